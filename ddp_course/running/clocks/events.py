"""Messages and collectives between ranks: `post` or `join` one, then `wait` for its end."""

import hashlib
import zlib
from typing import Any, NamedTuple

from . import arbiter
from .clock import own, process
from .table import BOOKED, FOREVER, GROUP, KIND, OPEN, SECOND, STAGE, TAG, Entry, where


class Ticket(NamedTuple):
    """What `wait` needs: an entry of the table, whether this side of it `sends`, and in words what
    is waited for.
    """

    entry: Entry
    sends: bool
    why: str

    @property
    def end(self) -> int | None:
        """The moment that is waited for; None as long as it is not known."""
        if self.entry.stage != BOOKED:
            return None
        return self.entry.departs if self.sends else self.entry.arrives


def post(sending: bool, nbytes: int, peer: int, group: int = 0, tag: int = 0) -> Ticket:
    """Announce a message to or from global rank `peer` in a group; return a ticket for `wait`."""
    table = process.table
    clock = own()
    sender, receiver = (table.rank, peer) if sending else (peer, table.rank)
    way = (sender, receiver, group, tag, sending)
    number = process.calls[way] = process.calls.get(way, 0) + 1
    key = hash((sender, receiver, group, tag, number))
    with table.lock:
        entry = come(key, 2, arbiter.MESSAGE, sender, receiver, group, tag, number)
        if sending:
            entry.size = nbytes
        if entry.present == 2:
            arbiter.make_ready(table, entry)
        elif sending:
            arbiter.tell_receiver_of_any(table, receiver, clock.moment)
    verb = "to send to" if sending else "to receive from"
    return Ticket(entry, sending, f"{verb} rank {peer}")


def join(group: int, members: list[int], duration: int, has_bytes: bool, name: str) -> Ticket:
    """Take part in a collective, which begins when all `members` (global ranks) have joined; return
    a ticket.
    """
    number = process.calls[group] = process.calls.get(group, 0) + 1
    what = f"for ranks {members} in {name}"
    key = hash((group, number, zlib.crc32(name.encode())))  # Unlike collectives never meet.
    return joined(key, arbiter.COLLECTIVE, group, number, members, duration, has_bytes, what)


def join_new_group(name: str, members: list[int]) -> int:
    """Make a group with all its members; return its number."""
    digest = hashlib.sha256(name.encode()).digest()
    key = int.from_bytes(digest[:7], "big")
    ticket = joined(
        key, arbiter.NEW_GROUP, 0, 0, members, 0, False, f"for ranks {members} to make a group"
    )
    stand_until_booked(ticket)
    number = ticket.entry.group  # once all have waited, the entry is free
    wait(ticket)
    process.table.members[number][process.table.rank] = 1
    return number


def joined(
    key: int,
    kind: int,
    group: int,
    number: int,
    members: list[int],
    duration: int,
    has_bytes: bool,
    what: str,
) -> Ticket:
    """Note that this rank has come to a collective."""
    table = process.table
    with table.lock:
        entry = come(key, len(members), kind, members[0], 0, group, int(has_bytes), number)
        entry.size = max(entry.size, duration)
        if entry.present == len(members):
            arbiter.make_ready(table, entry)
    return Ticket(entry, False, what)


def come(key: int, sides: int, *place: int) -> Entry:
    """Note, under the lock, that one of the `sides` of a message or a collective has come; return
    its entry. Its `place` among those of one moment is by the fields in `arbiter.ORDER`.
    """
    entry = arbiter.find(process.table, key or 1)  # the key 0 would be an entry that is free
    if not entry.stage:
        entry.stage = OPEN
        entry.readers = sides
        for field, value in zip(arbiter.ORDER, place, strict=True):
            setattr(entry, field, value)
    entry.moment = max(entry.moment, own().moment)  # type: ignore[union-attr]
    entry.present += 1
    return entry


def wait(ticket: Ticket) -> int:
    """Wait until the message has left (sender) or arrived (receiver), or the collective has ended;
    return when.
    """
    stand_until_booked(ticket)
    moment: Any = ticket.end
    own().advance(moment)  # type: ignore[union-attr]
    drop(ticket)
    return moment


def stand_until_booked(ticket: Ticket) -> None:
    """Stop this thread's clock until a ticket's moment is known."""
    clock = own()
    if ticket.end is not None:
        return
    with process.table.lock:
        booked = ticket.end is not None
        if not booked:
            clock.stop(ticket=ticket)
    if not booked:
        clock.stand(ticket.why)


def has_ended(ticket: Ticket) -> bool:
    """Return whether a ticket's moment has passed on this thread's clock."""
    return ticket.end is not None and ticket.end <= own().moment  # type: ignore[union-attr]


def drop(ticket: Ticket) -> None:
    """Nobody will wait with this ticket any more."""
    process.table.dropped.append(ticket.entry)


def oldest_sender(group: int, tag: int) -> int:
    """Wait for a message to this rank that its sender has posted; return the rank of the oldest."""
    table = process.table
    clock = own()
    clock.sleep_until(clock.moment, "for its turn")
    while True:
        with table.lock:
            rows = table.rows
            way = (rows[SECOND] == table.rank) & (rows[GROUP] == group) & (rows[TAG] == tag)
            posted = way & (rows[STAGE] == OPEN) & (rows[KIND] == arbiter.MESSAGE)
            sends = filter(is_next, where(table.entries, posted))
            found = [(send.moment, send.first) for send in sends]
            moment, sender = min(found, default=(FOREVER, 0))
            if moment <= clock.moment:
                return sender
            table.anyone[table.rank] = clock.slot + 1
            clock.stop(moment)
        clock.stand("to receive from any rank")
        table.anyone[table.rank] = 0


def is_next(send: Entry) -> bool:
    """Return whether a posted send is the next that this rank has not begun to receive."""
    way = (send.first, send.second, send.group, send.tag, False)
    return send.count == process.calls.get(way, 0) + 1
