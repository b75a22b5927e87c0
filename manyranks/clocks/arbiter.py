"""The arbiter: it books messages and collectives, and ends turns and timers, in the order of
virtual time.

There is no process of that name: whoever stops, or passes the moment for which the arbiter waits,
does its work. All functions are called under the table's lock.
"""

from collections.abc import Sequence
from ctypes import byref, memset, sizeof
from operator import attrgetter

from .table import (
    BLOCKED,
    BOOKED,
    COLLECTIVE,
    FOREVER,
    MESSAGE,
    NEW_GROUP,
    READY,
    RUNNING,
    Entry,
    Place,
    Table,
    Ways,
    least,
    where,
)

# Entries that are ready at one moment are booked in this order.
ORDER = attrgetter("kind", "first", "second", "group", "tag", "count")


def settle(table: Table) -> None:
    """Do all that is due, up to the first moment at which a thread may still do something; find out
    whether nothing can go on.
    """
    head = table.head
    while True:
        booking = first_ready(table)
        turn = least(table.threads["timer"])
        moment = min(booking, turn)
        if moment == FOREVER:
            break
        if least(table.threads["floor"]) <= moment:
            head.threshold = moment
            return
        head.latest = moment
        if booking == moment:
            for entry in ready_at(table, moment):
                book(table, entry)
        else:
            release(table, first_in_turn(table, moment), moment)
    head.threshold = FOREVER
    states = table.threads["state"]
    if len(table.waiting()) and not (states == RUNNING).any() and not head.failed:
        head.deadlock = 1
        for place in where(table.places, states == BLOCKED):
            table.wake(place)


def first_ready(table: Table) -> int:
    """Return the first moment at which an entry is to be booked; FOREVER if none is."""
    if not table.head.pending:  # mostly so: then there is no need to look at all entries
        return FOREVER
    ready = table.rows["stage"] == READY
    return int(table.rows["moment"][ready].min(initial=FOREVER))


def ready_at(table: Table, moment: int) -> list[Entry]:
    """Return the entries that are to be booked at this moment, in their order."""
    ready = table.rows["stage"] == READY
    return sorted(where(table.entries, ready & (table.rows["moment"] == moment)), key=ORDER)


def first_in_turn(table: Table, moment: int) -> Place:
    """Return the place of the thread that goes on at `moment`: the first by rank, then by number.
    A place is given to a new thread when its thread has ended, so places are in no order.
    """
    due = (table.threads["timer"] == moment).nonzero()[0].tolist()

    def rank_and_number(slot: int) -> tuple[int, int]:
        return slot // table.threads_per_rank, table.places[slot].number

    return table.places[min(due, key=rank_and_number)]


def make_ready(table: Table, entry: Entry) -> None:
    """All sides have come: book the entry when it is its turn, or at once if it needs no link."""
    entry.stage = READY
    table.head.pending += 1
    if not needs_order(table, entry):
        book(table, entry)
    elif entry.moment < table.head.threshold:
        table.head.threshold = entry.moment
        settle(table)


def needs_order(table: Table, entry: Entry) -> bool:
    """Return whether other bookings can matter to an entry, or it to them."""
    if entry.kind == NEW_GROUP:
        return True
    if entry.kind == MESSAGE:
        return table.step_takes(1 << 40, (entry.first, entry.second)) > 0
    return entry.duration > 0


def members_of(table: Table, entry: Entry) -> list[int]:
    """Return the ranks that take part in a collective."""
    members = table.members[entry.group]
    return [rank for rank in range(table.ranks) if members[rank]]


def ways_of(table: Table, ranks: Sequence[int]) -> list[Ways]:
    """Return the ways that these ranks use: on one host each its own, else those of their hosts."""
    if table.on_one_host(ranks):
        return [table.ways_inside[rank] for rank in ranks]
    hosts = dict.fromkeys(table.hosts[rank] for rank in ranks)  # in the order of ranks
    return [table.ways[host] for host in hosts]


def book(table: Table, entry: Entry) -> None:
    """Decide when a message or a collective ends, and let who waits for it go on."""
    entry.departs = entry.arrives = entry.moment
    if entry.kind == MESSAGE:
        book_message(table, entry)
    elif entry.kind == COLLECTIVE:
        book_collective(table, entry)
    else:
        entry.group = table.head.groups  # the number of the new group
        table.head.groups += 1
    entry.stage = BOOKED
    table.head.pending -= 1
    for place in where(table.places, table.threads["awaits"] == entry.key):
        release(table, place, entry.departs if place.sends else entry.arrives)
    free_if_read(entry)


def book_message(table: Table, entry: Entry) -> None:
    """Book a message on the way out of its sender's host and on the way in of its receiver's."""
    if not needs_order(table, entry):
        return
    ranks = (entry.first, entry.second)
    source, target = ways_of(table, ranks)
    duration = table.step_takes(entry.nbytes, ranks)
    latency = 0 if table.on_one_host(ranks) else table.latency
    duration -= latency
    start = max(entry.moment, source.out)
    entry.departs = source.out = start + duration
    entry.arrives = target.into = max(start + latency, target.into) + duration


def book_collective(table: Table, entry: Entry) -> None:
    """Book a collective on all ways of its members. Without bytes it uses no way; without a
    duration, as on one host that has no links inside, it takes no time.
    """
    if not entry.duration:
        return
    ways = ways_of(table, members_of(table, entry)) if entry.has_bytes else []
    start = entry.moment
    for way in ways:
        start = max(start, way.out, way.into)
    entry.arrives = start + entry.duration
    for way in ways:
        way.out = way.into = entry.arrives


def release(table: Table, place: Place, moment: int) -> None:
    """Let a blocked thread go on at `moment`, or at its own clock if that is later."""
    if place.state != BLOCKED:
        return
    if not place.stands:
        place.clock = max(moment, place.clock)
    place.floor = place.clock
    place.timer = FOREVER
    place.awaits = 0
    place.state = RUNNING  # it counts as running before it wakes, so that nobody passes it
    table.wake(place)


def tell_receivers_of_any(table: Table, receiver: int, moment: int) -> None:
    """A send was posted to rank `receiver`: its threads that wait for any rank have a turn then."""
    first = receiver * table.threads_per_rank
    own = slice(first, first + table.threads_per_rank)
    waiting = where(table.places[own], table.threads["from_any"][own])
    for place in waiting:
        if place.state == BLOCKED:
            place.timer = min(place.timer, max(moment, place.clock))
    if waiting:
        settle(table)


def find(table: Table, key: int) -> Entry:
    """Return the entry with this key; a new one, in stage 0, if there is none yet. Raises
    RuntimeError if the table is full.
    """
    for entry in table.dropped:
        entry.readers -= 1
        free_if_read(entry)
    table.dropped.clear()
    keys = table.rows["key"]
    # An entry is in this row, unless another one was there when it came.
    entry = table.entries[key % len(keys)]
    if entry.key == key:
        return entry
    known = where(table.entries, keys == key)
    if known:
        return known[0]
    if entry.key:
        free = where(table.entries, keys == 0)
        if not free:
            raise RuntimeError(
                f"more than {len(keys)} messages and collectives are under way:"
                " wait for some of them"
            )
        entry = free[0]
    entry.key = key
    return entry


def free_if_read(entry: Entry) -> None:
    """Free an entry that is booked, if no side will read it any more."""
    if entry.stage == BOOKED and entry.readers == 0:
        memset(byref(entry), 0, sizeof(entry))
