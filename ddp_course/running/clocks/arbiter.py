"""The arbiter: it books messages and collectives, and ends turns and timers, in the order of
virtual time.

There is no process of that name: whoever stops, or passes the moment for which the arbiter waits,
does its work. All functions are called under the table's lock.
"""

from .table import (
    ARRIVES,
    AWAITS,
    BLOCKED,
    BOOKED,
    CLOCK,
    COUNT,
    DEADLOCK,
    DEPARTS,
    FAILED,
    FIRST,
    FLOOR,
    FOREVER,
    GROUP,
    GROUPS,
    KEY,
    KIND,
    LATEST,
    MOMENT,
    NEEDED,
    NUMBER,
    PENDING,
    READERS,
    READY,
    RUNNING,
    SECOND,
    SIDE,
    SIZE,
    STAGE,
    STATE,
    TAG,
    THRESHOLD,
    TIMER,
    Table,
)

# The kinds of a row; those of one moment are booked in this order.
MESSAGE, COLLECTIVE, NEW_GROUP = range(3)
ORDER = [KIND, FIRST, SECOND, GROUP, TAG, COUNT]  # what a row is sorted by


def settle(table: Table) -> None:
    """Book all that no thread can come before any more; find out whether nothing can go on."""
    head = table.head
    threads = table.arrays["threads"]
    floors = threads[FLOOR]  # `argmin` and one index take a third of the time of `min`
    timers = threads[TIMER]
    while True:
        ready = FOREVER
        if head[PENDING]:
            rows = (table.arrays["rows"][STAGE] == READY).nonzero()[0]
            moments = table.arrays["rows"][MOMENT, rows]
            ready = int(moments.min(initial=FOREVER))
        timer = table.threads[TIMER, int(timers.argmin())]
        moment = min(ready, timer)
        floor = table.threads[FLOOR, int(floors.argmin())]
        if floor <= moment < FOREVER:
            head[THRESHOLD] = moment
            return
        if moment == FOREVER:
            break
        head[LATEST] = moment
        if ready == moment:
            due = rows[moments == moment].tolist()
            for row in sorted(due, key=lambda row: [table.rows[field, row] for field in ORDER]):
                book(table, row)
        else:
            release(table, first_due(table, moment), moment)
    head[THRESHOLD] = FOREVER
    states = threads[STATE]
    waiting = (states == BLOCKED) & (threads[NEEDED] > 0)
    if waiting.any() and not (states == RUNNING).any() and not head[FAILED]:
        head[DEADLOCK] = 1
        for slot in (states == BLOCKED).nonzero()[0].tolist():
            table.wake(slot)


def first_due(table: Table, moment: int) -> int:
    """Return the place of the thread that goes on at `moment`: the first by rank, then by number.
    A place is given to a new thread when its thread has ended, so places are in no order.
    """
    due = (table.arrays["threads"][TIMER] == moment).nonzero()[0].tolist()

    def rank_and_number(slot: int) -> tuple[int, int]:
        return slot // table.threads_per_rank, table.threads[NUMBER, slot]

    return min(due, key=rank_and_number)


def make_ready(table: Table, row: int) -> None:
    """All sides of a row have come: book it when it is its turn, or at once if it needs no link."""
    table.rows[STAGE, row] = READY
    table.head[PENDING] += 1
    moment = table.rows[MOMENT, row]
    if not needs_order(table, row):
        book(table, row)
    elif moment < table.head[THRESHOLD]:
        table.head[THRESHOLD] = moment
        settle(table)


def needs_order(table: Table, row: int) -> bool:
    """Return whether other bookings can matter to a row, or it to them."""
    if table.rows[KIND, row] == NEW_GROUP:
        return True
    if table.rows[KIND, row] == MESSAGE:
        return bool(table.byte or table.latency) and not same_host(table, row)
    return table.rows[SIZE, row] > 0 and len(hosts_of(table, row)) > 1


def same_host(table: Table, row: int) -> bool:
    """Return whether a message stays in its host."""
    return table.hosts[table.rows[FIRST, row]] == table.hosts[table.rows[SECOND, row]]


def hosts_of(table: Table, row: int) -> list[int]:
    """Return the hosts of a collective's members."""
    members = table.arrays["members"][table.rows[GROUP, row]].nonzero()[0].tolist()
    return sorted({table.hosts[rank] for rank in members})


def book(table: Table, row: int) -> None:
    """Decide when a message or a collective ends, and let who waits for it go on."""
    rows = table.rows
    if rows[KIND, row] == MESSAGE:
        departs, arrives = times_of_message(table, row)
    else:
        departs = arrives = end_of_collective(table, row)
    rows[DEPARTS, row] = departs
    rows[ARRIVES, row] = arrives
    rows[STAGE, row] = BOOKED
    table.head[PENDING] -= 1
    for slot in (table.arrays["threads"][AWAITS] == row + 1).nonzero()[0].tolist():
        release(table, slot, rows[table.threads[SIDE, slot], row])


def times_of_message(table: Table, row: int) -> tuple[int, int]:
    """Book a message on the way out of its sender's host and on the way in of its receiver's; both
    times are its end.
    """
    ready = table.rows[MOMENT, row]
    if not needs_order(table, row):
        return ready, ready
    source = table.hosts[table.rows[FIRST, row]]
    target = table.hosts[table.rows[SECOND, row]]
    duration = table.bytes_take(table.rows[SIZE, row])
    start = max(ready, table.links[0, source])
    departs = start + duration
    arrives = max(start + table.latency, table.links[1, target]) + duration
    table.links[0, source] = departs
    table.links[1, target] = arrives
    return departs, arrives


def end_of_collective(table: Table, row: int) -> int:
    """Book a collective on all links of its members' hosts; a new group gets its number instead."""
    rows = table.rows
    ready = rows[MOMENT, row]
    if rows[KIND, row] == NEW_GROUP:
        rows[GROUP, row] = table.head[GROUPS]
        table.head[GROUPS] += 1
        return ready
    hosts = hosts_of(table, row)
    if len(hosts) == 1:
        return ready
    if rows[TAG, row] == 0:  # this collective has no bytes
        return ready + rows[SIZE, row]
    links = table.arrays["links"]
    end = max(ready, int(links[:, hosts].max())) + rows[SIZE, row]
    links[:, hosts] = end
    return end


def release(table: Table, slot: int, moment: int) -> None:
    """Let a blocked thread go on at `moment`, or at its own clock if that is later."""
    threads = table.threads
    if threads[STATE, slot] != BLOCKED:
        return
    clock = max(moment, threads[CLOCK, slot])
    threads[CLOCK, slot] = clock
    threads[FLOOR, slot] = clock
    threads[TIMER, slot] = FOREVER
    threads[AWAITS, slot] = 0
    threads[STATE, slot] = RUNNING  # it counts as running before it wakes, so that nobody passes it
    table.wake(slot)


def tell_receiver_of_any(table: Table, receiver: int, moment: int) -> None:
    """A send was posted to `receiver`: if it waits for any rank, it has a turn at that moment."""
    slot = table.anyone[receiver] - 1
    if slot >= 0 and table.threads[STATE, slot] == BLOCKED:
        turn = max(moment, table.threads[CLOCK, slot])
        table.threads[TIMER, slot] = min(table.threads[TIMER, slot], turn)
        table.head[THRESHOLD] = min(table.head[THRESHOLD], turn)
        settle(table)


def find(table: Table, key: int) -> int:
    """Return the row with this key; a new one, in state 0, if there is none yet. Raises
    RuntimeError if the table is full.
    """
    for row in table.dropped:
        forget_reader(table, row)
    table.dropped.clear()
    keys = table.arrays["rows"][KEY]
    row = key % len(keys)  # a key is in this row, unless another key was there when it came
    if table.rows[KEY, row] == key:
        return row
    known = (keys == key).nonzero()[0]
    if len(known):
        return int(known[0])
    if table.rows[KEY, row]:
        free = (keys == 0).nonzero()[0]
        if not len(free):
            raise RuntimeError(
                f"more than {len(keys)} messages and collectives are under way:"
                " wait for some of them"
            )
        row = int(free[0])
    table.arrays["rows"][:, row] = 0
    table.rows[KEY, row] = key
    return row


def forget_reader(table: Table, row: int) -> None:
    """One side of a row has read it, or never will; the last one frees the row."""
    table.rows[READERS, row] -= 1
    if table.rows[READERS, row] == 0:
        table.rows[KEY, row] = 0
        table.rows[STAGE, row] = 0
