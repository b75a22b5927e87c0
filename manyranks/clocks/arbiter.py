"""The arbiter books messages and collectives and ends turns, in the order of virtual time.

It is no process: each thread that stops, or that passes the next moment at which something is due,
does the arbiter's work. All functions are called under the table's lock.
"""

from collections.abc import Sequence
from ctypes import byref, memset, sizeof
from operator import attrgetter
from typing import Any, NamedTuple

from .table import (
    BLOCKED,
    BOOKED,
    COLLECTIVE,
    FOREVER,
    FROM_ANY,
    MATCHED,
    MESSAGE,
    NEW_GROUP,
    OPEN,
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
# Threads wait in vain once daemons alone have gone on for six hours (here in picoseconds).
PATIENCE = 6 * 3600 * 10**12
# A receive from any rank takes a send with the same receiver, group and tag.
CHANNEL = attrgetter("second", "group", "tag")
# Sends are sorted by these fields, the oldest first.
AGE = attrgetter("moment", "first", "count")


class Match(NamedTuple):
    """The moment at which a receive from any rank gets the message of a send: two entries."""

    moment: int
    receive: Any
    send: Any


NO_MATCH = Match(FOREVER, None, None)


def settle(table: Table) -> None:
    """Do all that is due before the first moment at which a thread may still do something.

    If nothing can go on any more, note the deadlock and wake all threads that wait.
    """
    head = table.head
    while True:
        next_booking = first_ready(table)
        next_turn = least(table.threads["timer"])
        next_match = first_match(table)
        moment = min(next_booking, next_turn, next_match.moment)
        if moment == FOREVER or only_daemons_live(table, moment):
            break
        if least(table.threads["floor"]) <= moment:
            head.threshold = moment
            return
        head.latest = moment
        due = in_turn(table, moment) if next_turn == moment else []
        posting = [place for place in due if place.posts]
        if next_booking == moment and not posting:
            for entry in ready_at(table, moment):
                book(table, entry)
        elif next_match.moment == moment and not posting:
            match(table, next_match)
        else:
            release(table, (posting or due)[0], moment)
    head.threshold = FOREVER
    find_deadlock(table)


def find_deadlock(table: Table) -> None:
    """Note a deadlock, and wake all threads that wait, if threads wait and nothing can go on."""
    head = table.head
    threads = table.threads
    alive = (threads["state"] == RUNNING) | (threads["outside"] > 0)
    if not len(table.waiting()) or head.failed or head.deadlock:
        return
    if not alive.any() or only_daemons_live(table, least(threads["floor"])):
        head.deadlock = 1
        for place in where(table.places, threads["state"] == BLOCKED):
            table.wake(place)
    else:
        head.threshold = head.needed + PATIENCE


def only_daemons_live(table: Table, moment: int) -> bool:
    """Return whether only daemons have gone on for so long that the other threads wait in vain.

    So a daemon that ticks for ever hides no deadlock.
    """
    if moment <= table.head.needed + PATIENCE:
        return False
    threads = table.threads
    needed = threads["needed"] > 0
    goes_on = (
        (threads["state"] == RUNNING) | (threads["timer"] < FOREVER) | (threads["outside"] > 0)
    )
    # torch itself gives up on a message that does not come, so only waits for ranks count: a thread
    # may wait for a daemon for ever.
    waits_for_rank = threads["awaits"] != 0
    return bool((needed & waits_for_rank).any() and not (needed & goes_on).any())


def first_ready(table: Table) -> int:
    """Return the first moment at which an entry is to be booked; FOREVER if none is."""
    # Mostly nothing is pending, and then there is no need to look at all entries.
    if not table.head.pending:
        return FOREVER
    ready = table.rows["stage"] == READY
    return int(table.rows["moment"][ready].min(initial=FOREVER))


def ready_at(table: Table, moment: int) -> list[Entry]:
    """Return the entries that are to be booked at this moment, in their order."""
    ready = table.rows["stage"] == READY
    return sorted(where(table.entries, ready & (table.rows["moment"] == moment)), key=ORDER)


def in_turn(table: Table, moment: int) -> list[Place]:
    """Return the places of the threads that may go on at `moment`, by rank, then by number.

    A new thread gets the place of one that has ended, so the order of places says nothing.
    """
    due = (table.threads["timer"] == moment).nonzero()[0].tolist()

    def rank_and_number(slot: int) -> tuple[int, int]:
        return slot // table.threads_per_rank, table.places[slot].number

    return [table.places[slot] for slot in sorted(due, key=rank_and_number)]


def make_ready(table: Table, entry: Entry) -> None:
    """Book an entry whose sides have all come, at its turn, or at once if it needs no link."""
    entry.stage = READY
    table.head.pending += 1
    if not needs_order(table, entry):
        book(table, entry)
    elif entry.moment < table.head.threshold:
        table.head.threshold = entry.moment
        settle(table)


def needs_order(table: Table, entry: Entry) -> bool:
    """Return whether an entry's booking depends on other bookings, or others on it."""
    if entry.kind == NEW_GROUP:
        return True
    if entry.kind == MESSAGE:
        # A TiB takes time on every link that is emulated.
        return table.step_takes(1 << 40, (entry.first, entry.second)) > 0
    return entry.duration > 0


def members_of(table: Table, entry: Entry) -> list[int]:
    """Return the ranks that take part in a collective."""
    members = table.members[entry.group]
    return [rank for rank in range(table.ranks) if members[rank]]


def ways_of(table: Table, ranks: Sequence[int]) -> list[Ways]:
    """Return the ways that ranks use: on one host each has its own, else those of their hosts."""
    if table.on_one_host(ranks):
        return [table.ways_inside[rank] for rank in ranks]
    hosts = dict.fromkeys(table.hosts[rank] for rank in ranks)  # in the order of ranks
    return [table.ways[host] for host in hosts]


def book(table: Table, entry: Entry) -> None:
    """Decide when a message or a collective ends, and let those who wait for it go on."""
    entry.departs = entry.arrives = entry.moment
    if entry.kind == MESSAGE:
        book_message(table, entry)
    elif entry.kind == COLLECTIVE:
        book_collective(table, entry)
    else:
        # The new group gets the next free number.
        entry.group = table.head.groups
        table.head.groups += 1
    table.head.pending -= 1
    if entry.for_any:
        receive = find(table, entry.for_any)
        receive.arrives = entry.arrives
        entry.readers -= 1  # Its receiver reads the other entry.
        end(table, receive)
    end(table, entry)


def end(table: Table, entry: Entry) -> None:
    """Let those who wait for a message or a collective go on, since its end is known now."""
    entry.stage = BOOKED
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
    """Book a collective on all ways of its members.

    A collective without bytes uses no way. One without a duration, as on one host that has no links
    inside, takes no time.
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
    if place.needed:
        table.head.needed = max(table.head.needed, place.clock)
    # It counts as running before it wakes, so that nobody passes it.
    place.state = RUNNING
    table.wake(place)


def first_match(table: Table) -> Match:
    """Return the first match of a receive from any rank, or NO_MATCH.

    In each channel the oldest receive gets the oldest send.
    """
    if not table.head.from_any:
        return NO_MATCH
    rows = table.rows
    opened = rows["stage"] == OPEN
    receives = where(table.entries, opened & (rows["kind"] == FROM_ANY))
    sends = where(table.entries, opened & (rows["sent"] == 1))
    matches = []
    for channel in sorted(set(map(CHANNEL, receives))):
        sent = [send for send in sends if CHANNEL(send) == channel]
        if sent:
            waiting = [receive for receive in receives if CHANNEL(receive) == channel]
            receive = min(waiting, key=attrgetter("count"))
            send = min(sent, key=AGE)
            matches.append(Match(max(receive.moment, send.moment), receive, send))
    return min(matches, key=attrgetter("moment"), default=NO_MATCH)


def match(table: Table, matched: Match) -> None:
    """Let a receive from any rank get the message of a send."""
    moment, receive, send = matched
    table.head.from_any -= 1
    receive.first = send.first
    receive.stage = MATCHED
    send.for_any = receive.key
    send.moment = moment
    table.head.threshold = moment  # The caller settles what follows.
    make_ready(table, send)


def find(table: Table, key: int) -> Entry:
    """Return the entry with this key; a new one, in stage 0, if there is none yet.

    Raises RuntimeError if the table is full.
    """
    # Other threads may drop more entries while this loop runs.
    while table.dropped:
        entry = table.dropped.pop()
        entry.readers -= 1
        free_if_read(entry)
    keys = table.rows["key"]
    # An entry is in this row, unless the row was taken when the entry came.
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
    """Free an entry if it is booked and no side will read it any more."""
    if entry.stage == BOOKED and entry.readers == 0:
        memset(byref(entry), 0, sizeof(entry))
