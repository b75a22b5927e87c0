"""The arbiter: it books messages and collectives, and ends turns and timers, in the order of
virtual time.

There is no process of that name: whoever stops, or passes the moment for which the arbiter waits,
does its work. All functions are called under the table's lock.
"""

from ctypes import byref, memset, sizeof
from operator import attrgetter

from .table import (
    AWAITS,
    BLOCKED,
    BOOKED,
    FLOOR,
    FOREVER,
    KEY,
    MOMENT,
    READY,
    RUNNING,
    STAGE,
    STATE,
    TIMER,
    Entry,
    Place,
    Table,
    where,
)

# The kinds of an entry; those of one moment are booked in this order.
MESSAGE, COLLECTIVE, NEW_GROUP = range(3)
ORDER = ("kind", "first", "second", "group", "tag", "count")  # what an entry is sorted by


def settle(table: Table) -> None:
    """Book all that no thread can come before any more; find out whether nothing can go on."""
    head = table.head
    floors = table.threads[FLOOR]  # `argmin` and one index take a third of the time of `min`
    timers = table.threads[TIMER]
    while True:
        ready = FOREVER
        if head.pending:
            rows = (table.rows[STAGE] == READY).nonzero()[0]
            moments = table.rows[MOMENT, rows]
            ready = int(moments.min(initial=FOREVER))
        timer = table.places[int(timers.argmin())].timer
        moment = min(ready, timer)
        floor = table.places[int(floors.argmin())].floor
        if floor <= moment < FOREVER:
            head.threshold = moment
            return
        if moment == FOREVER:
            break
        head.latest = moment
        if ready == moment:
            due = [table.entries[row] for row in rows[moments == moment].tolist()]
            for entry in sorted(due, key=attrgetter(*ORDER)):
                book(table, entry)
        else:
            release(table, first_due(table, moment), moment)
    head.threshold = FOREVER
    states = table.threads[STATE]
    if len(table.waiting()) and not (states == RUNNING).any() and not head.failed:
        head.deadlock = 1
        for place in where(table.places, states == BLOCKED):
            table.wake(place)


def first_due(table: Table, moment: int) -> Place:
    """Return the place of the thread that goes on at `moment`: the first by rank, then by number.
    A place is given to a new thread when its thread has ended, so places are in no order.
    """
    due = (table.threads[TIMER] == moment).nonzero()[0].tolist()

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
        same_host = table.hosts[entry.first] == table.hosts[entry.second]
        return bool(table.byte or table.latency) and not same_host
    return entry.size > 0 and len(hosts_of(table, entry)) > 1


def hosts_of(table: Table, entry: Entry) -> set[int]:
    """Return the hosts of a collective's members."""
    members = table.members[entry.group]
    return {host for host, member in zip(table.hosts, members, strict=True) if member}


def book(table: Table, entry: Entry) -> None:
    """Decide when a message or a collective ends, and let who waits for it go on."""
    if entry.kind == MESSAGE:
        book_message(table, entry)
    else:
        entry.departs = entry.arrives = end_of_collective(table, entry)
    entry.stage = BOOKED
    table.head.pending -= 1
    for place in where(table.places, table.threads[AWAITS] == entry.key):
        release(table, place, entry.departs if place.sends else entry.arrives)


def book_message(table: Table, entry: Entry) -> None:
    """Book a message on the way out of its sender's host and on the way in of its receiver's."""
    entry.departs = entry.arrives = entry.moment
    if not needs_order(table, entry):
        return
    source = table.ways[table.hosts[entry.first]]
    target = table.ways[table.hosts[entry.second]]
    duration = table.bytes_take(entry.size)
    start = max(entry.moment, source.out)
    entry.departs = source.out = start + duration
    entry.arrives = target.into = max(start + table.latency, target.into) + duration


def end_of_collective(table: Table, entry: Entry) -> int:
    """Book a collective on all links of its members' hosts; a new group gets its number instead."""
    if entry.kind == NEW_GROUP:
        entry.group = table.head.groups
        table.head.groups += 1
        return entry.moment
    hosts = hosts_of(table, entry)
    if len(hosts) == 1:
        return entry.moment
    end = entry.moment + entry.size
    if entry.tag == 0:  # this collective has no bytes
        return end
    ways = [table.ways[host] for host in hosts]
    for way in ways:
        end = max(end, max(way.out, way.into) + entry.size)
    for way in ways:
        way.out = way.into = end
    return end


def release(table: Table, place: Place, moment: int) -> None:
    """Let a blocked thread go on at `moment`, or at its own clock if that is later."""
    if place.state != BLOCKED:
        return
    place.clock = max(moment, place.clock)
    place.floor = place.clock
    place.timer = FOREVER
    place.awaits = 0
    place.state = RUNNING  # it counts as running before it wakes, so that nobody passes it
    table.wake(place)


def tell_receiver_of_any(table: Table, receiver: int, moment: int) -> None:
    """A send was posted to `receiver`: if it waits for any rank, it has a turn at that moment."""
    # `anyone` has the slot of the thread that waits for any rank, plus 1; 0 means that none does.
    waiting = table.anyone[receiver]
    if not waiting or table.places[waiting - 1].state != BLOCKED:
        return
    place = table.places[waiting - 1]
    turn = max(moment, place.clock)
    place.timer = min(place.timer, turn)
    table.head.threshold = min(table.head.threshold, turn)
    settle(table)


def find(table: Table, key: int) -> Entry:
    """Return the entry with this key; a new one, in stage 0, if there is none yet. Raises
    RuntimeError if the table is full.
    """
    for entry in table.dropped:
        forget_reader(entry)
    table.dropped.clear()
    keys = table.rows[KEY]
    # An entry is at this place, unless another one was there when it came.
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


def forget_reader(entry: Entry) -> None:
    """One side of an entry has read it, or never will; the last one frees it."""
    entry.readers -= 1
    if entry.readers == 0:
        memset(byref(entry), 0, sizeof(entry))
