"""Messages and collectives between ranks: `post` or `join` one, then `wait` for its end."""

import hashlib
import zlib
from dataclasses import dataclass
from typing import Any

from ..errors import Awaited
from . import arbiter
from .clock import own, process
from .table import (
    ANY,
    BOOKED,
    COLLECTIVE,
    FOREVER,
    FROM_ANY,
    MESSAGE,
    MOST_GROUPS,
    NEW_GROUP,
    OPEN,
    Entry,
    plain_lock,
)

dropping = plain_lock()  # One thread of this process at a time drops a ticket.


@dataclass(eq=False)
class Ticket:
    """What `wait` needs of a message or a collective.

    `entry` is that of the table, `sends` says whether this side is the sender, and `what` says what
    this side waits for. Several threads may wait with one ticket; the first that goes on gives the
    entry back, and leaves its end in `ended`.
    """

    entry: Entry
    sends: bool
    what: Awaited
    ended: int | None = None
    dropped: bool = False

    @property
    def end(self) -> int | None:
        """The moment for which this side waits; None as long as it is not known."""
        end = None
        if self.entry.stage == BOOKED:
            end = self.entry.departs if self.sends else self.entry.arrives
        # The entry may have become another one's while it was read: then this is known.
        return end if self.ended is None else self.ended


def post(sending: bool, nbytes: int, peer: int, group: int = 0, tag: int = 0) -> Ticket:
    """Announce a message to or from global rank `peer`, or from ANY; return a ticket for `wait`."""
    table = process.table
    if sending:
        sender = table.rank
        receiver = peer
    else:
        sender = peer
        receiver = table.rank
    channel = (sender, receiver, group, tag)
    process.calls[channel, sending] += 1
    count = process.calls[channel, sending]
    # The hash of numbers is the same in all processes; that of a text is not.
    key = hash((*channel, count))
    with table.lock:
        entry = register_side(
            key,
            sides=2,  # A receive from any rank is read twice, too: its sender and its end.
            kind=FROM_ANY if peer == ANY else MESSAGE,
            first=sender,
            second=receiver,
            group=group,
            tag=tag,
            count=count,
        )
        if sending:
            entry.nbytes = nbytes
            entry.sent = 1
        table.head.from_any += peer == ANY
        if entry.present == 2:
            arbiter.make_ready(table, entry)
        elif table.head.from_any:
            arbiter.settle(table)
    return Ticket(entry, sending, awaited_message(sending, peer))


def awaited_message(sending: bool, peer: int) -> Awaited:
    """Return what one side of a message waits for."""
    if peer == ANY:
        return Awaited("receive from any")
    return Awaited("send" if sending else "receive", (peer,))


def join(group: int, members: list[int], duration: int, has_bytes: bool, name: str) -> Ticket:
    """Take part in a collective of all `members`, which are global ranks; return a ticket.

    The collective begins when all members have joined.
    """
    table = process.table
    process.calls[group] += 1
    count = process.calls[group]
    # The name is part of the key, so collectives of different kinds never meet.
    key = hash((group, count, zlib.crc32(name.encode())))
    with table.lock:
        entry = register_side(key, sides=len(members), kind=COLLECTIVE, group=group, count=count)
        entry.duration = max(entry.duration, duration)
        entry.has_bytes = max(entry.has_bytes, has_bytes)
        if entry.present == len(members):
            arbiter.make_ready(table, entry)
    return Ticket(entry, False, Awaited("collective", tuple(members), name))


def join_new_group(name: str, members: list[int]) -> int:
    """Make a group with all its members; return its number.

    Raises RuntimeError if the launch has made too many.
    """
    table = process.table
    digest = hashlib.sha256(name.encode()).digest()
    # A field of the table has eight bytes, of which one bit is the sign.
    key = int.from_bytes(digest[:7], "big")
    with table.lock:
        entry = register_side(key, sides=len(members), kind=NEW_GROUP, first=members[0])
        if entry.present == len(members):
            arbiter.make_ready(table, entry)
    ticket = Ticket(entry, False, Awaited("new group", tuple(members)))
    stand_until_booked(ticket)
    # The number is read first: once all members have waited, the entry is free.
    number = entry.group
    wait(ticket)
    if number >= MOST_GROUPS:
        raise RuntimeError(
            f"more than {MOST_GROUPS} process groups were made in one launch: make them once, and"
            " use them again"
        )
    table.members[number][table.rank] = 1
    return number


def register_side(key: int, sides: int, **fields: int) -> Entry:
    """Note, under the lock, that one of the `sides` of a message or a collective has come.

    Return its entry, in which the first side writes the `fields`.
    """
    # An entry with the key 0 is free, so no message has that key.
    entry = arbiter.find(process.table, key or 1)
    if not entry.stage:
        entry.stage = OPEN
        entry.readers = sides
        for name, value in fields.items():
            setattr(entry, name, value)
    entry.moment = max(entry.moment, own().moment)  # type: ignore[union-attr]
    entry.present += 1
    return entry


def wait(ticket: Ticket) -> int:
    """Wait for a ticket's message or collective; return the moment of its end.

    For its sender a message ends when it has left, for its receiver when it has arrived.
    """
    stand_until_booked(ticket)
    moment: Any = ticket.end  # It is known now.
    own().advance(moment)  # type: ignore[union-attr]
    drop(ticket)
    return moment


def stand_until_booked(ticket: Ticket, until: int = FOREVER) -> None:
    """Stop this thread's clock until a ticket's end is known, or the moment `until` has come."""
    clock = own()
    if ticket.end is not None:
        return
    with process.table.lock:
        booked = ticket.end is not None
        if not booked:
            clock.stop(until, ticket)
    if not booked:
        clock.stand(ticket.what)


def ends_by(ticket: Ticket, until: int) -> bool:
    """Wait until a ticket's end is known, or `until` has come; return whether it ends by then."""
    stand_until_booked(ticket, until)
    return ticket.end is not None and ticket.end <= until


def has_ended(ticket: Ticket) -> bool:
    """Return whether what a ticket is for has ended, by this thread's clock."""
    return ticket.end is not None and ticket.end <= own().moment  # type: ignore[union-attr]


def drop(ticket: Ticket) -> None:
    """Give a ticket's entry back, once: this side will read it no more."""
    with dropping:
        if ticket.dropped:
            return
        ticket.ended = ticket.end
        ticket.dropped = True
    give_back(ticket.entry)


def give_back(entry: Entry) -> None:
    """Say that one of those who read an entry will read it no more."""
    process.table.dropped.append(entry)


def count_received(sender: int, group: int, tag: int) -> None:
    """Count a message of `sender` that a receive from any rank has got.

    The sender's next message is then for the next receive.
    """
    process.calls[(sender, process.table.rank, group, tag), False] += 1
