"""Messages and collectives between ranks: `post` or `join` one, then `wait` for its end."""

import hashlib
import zlib
from typing import NamedTuple

from . import arbiter
from .clock import own, process
from .table import (
    ARRIVES,
    BOOKED,
    COUNT,
    DEPARTS,
    FIRST,
    FOREVER,
    GROUP,
    KIND,
    MOMENT,
    OPEN,
    PRESENT,
    READERS,
    SECOND,
    SIZE,
    STAGE,
    TAG,
)


class Ticket(NamedTuple):
    """What `wait` needs: a `row` of the table, which of its moments counts, and in words what is
    waited for.
    """

    row: int
    side: int
    why: str


def post(sending: bool, nbytes: int, peer: int, group: int = 0, tag: int = 0) -> Ticket:
    """Announce a message to or from global rank `peer` in a group; return a ticket for `wait`."""
    table = process.table
    clock = own()
    sender, receiver = (table.rank, peer) if sending else (peer, table.rank)
    way = (sender, receiver, group, tag, sending)
    number = process.calls[way] = process.calls.get(way, 0) + 1
    key = hash((sender, receiver, group, tag, number))
    with table.lock:
        row = come(key, 2, arbiter.MESSAGE, sender, receiver, group, tag, number)
        if sending:
            table.rows[SIZE, row] = nbytes
        if table.rows[PRESENT, row] == 2:
            arbiter.make_ready(table, row)
        elif sending:
            arbiter.tell_receiver_of_any(table, receiver, clock.moment)
    verb = "to send to" if sending else "to receive from"
    return Ticket(row, DEPARTS if sending else ARRIVES, f"{verb} rank {peer}")


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
    number = process.table.rows[GROUP, ticket.row]  # once all have waited, the row is free
    wait(ticket)
    process.table.members[number, process.table.rank] = 1
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
        row = come(key, len(members), kind, members[0], 0, group, int(has_bytes), number)
        table.rows[SIZE, row] = max(table.rows[SIZE, row], duration)
        if table.rows[PRESENT, row] == len(members):
            arbiter.make_ready(table, row)
    return Ticket(row, ARRIVES, what)


def come(key: int, sides: int, *place: int) -> int:
    """Note, under the lock, that one of the `sides` of a message or a collective has come; return
    its row. Its `place` among those of one moment is by the properties in `arbiter.ORDER`.
    """
    table = process.table
    row = arbiter.find(table, key or 1)  # the key 0 would be a row that is free
    rows = table.rows
    if not rows[STAGE, row]:
        rows[STAGE, row] = OPEN
        rows[READERS, row] = sides
        for field, value in zip(arbiter.ORDER, place, strict=True):
            rows[field, row] = value
    rows[MOMENT, row] = max(rows[MOMENT, row], own().moment)  # type: ignore[union-attr]
    rows[PRESENT, row] += 1
    return row


def wait(ticket: Ticket) -> int:
    """Wait until the message has left (sender) or arrived (receiver), or the collective has ended;
    return when.
    """
    stand_until_booked(ticket)
    table = process.table
    clock = own()
    moment = table.rows[ticket.side, ticket.row]
    clock.advance(moment)
    table.dropped.append(ticket.row)
    return moment


def stand_until_booked(ticket: Ticket) -> None:
    """Stop this thread's clock until a ticket's moment is known."""
    table = process.table
    clock = own()
    if table.rows[STAGE, ticket.row] == BOOKED:
        return
    with table.lock:
        booked = table.rows[STAGE, ticket.row] == BOOKED
        if not booked:
            clock.stop(row=ticket.row, side=ticket.side)
    if not booked:
        clock.stand(ticket.why)


def has_ended(ticket: Ticket) -> bool:
    """Return whether a ticket's moment has passed on this thread's clock."""
    table = process.table
    booked = table.rows[STAGE, ticket.row] == BOOKED
    return booked and table.rows[ticket.side, ticket.row] <= own().moment


def drop(ticket: Ticket) -> None:
    """Nobody will wait with this ticket."""
    process.table.dropped.append(ticket.row)


def oldest_sender(group: int, tag: int) -> int:
    """Wait for a message to this rank that its sender has posted; return the rank of the oldest."""
    table = process.table
    clock = own()
    clock.sleep_until(clock.moment, "for its turn")
    while True:
        with table.lock:
            rows = table.arrays["rows"]
            way = (rows[SECOND] == table.rank) & (rows[GROUP] == group) & (rows[TAG] == tag)
            sent = way & (rows[STAGE] == OPEN) & (rows[KIND] == arbiter.MESSAGE)
            found = [row for row in sent.nonzero()[0].tolist() if is_next_of(row)]
            due = [row for row in found if table.rows[MOMENT, row] <= clock.moment]
            if due:
                first = min(due, key=lambda row: (table.rows[MOMENT, row], table.rows[FIRST, row]))
                return table.rows[FIRST, first]
            timer = min((table.rows[MOMENT, row] for row in found), default=FOREVER)
            table.anyone[table.rank] = clock.slot + 1
            clock.stop(timer)
        clock.stand("to receive from any rank")
        table.anyone[table.rank] = 0


def is_next_of(row: int) -> bool:
    """Return whether a posted send is the next that this rank has not begun to receive."""
    rows = process.table.rows
    way = (rows[FIRST, row], rows[SECOND, row], rows[GROUP, row], rows[TAG, row], False)
    return rows[COUNT, row] == process.calls.get(way, 0) + 1
