"""Small random programs of messages, and what all their interleavings come to.

They are the oracle for `every_order`. A program has a list of steps for each rank, which has three
buffers and a sum of what it read:

    ("send", message, buffer, peer)   post, the bytes leave at any moment until the wait is over
    ("receive", message, buffer, peer)
    ("wait", kind, message)           for the send or the receive of this rank
    ("write", buffer, number)         buffer = 3 buffer + number
    ("read", buffer)                  sum = 31 sum + buffer

Every interleaving of the ranks' steps with the moments at which bytes are read from the sender's
buffer and written to the receiver's is tried, on three networks: one has buffers (a send ends when
its bytes are read), one has none (a send ends when they are delivered), and one checks. That one
reads a message when it is posted and marks the buffer that receives it, as MPI allows; a run is
spoiled if the mark is gone when the message arrives, or if what was sent changes before the wait.
"""

import random
from typing import Any, NamedTuple

BUFFERS = 3
MODULUS = 2**20  # whole numbers up to here are exact in float64, also times 31
BUFFERED, UNBUFFERED, CHECKING = range(3)  # the networks


class Outcome(NamedTuple):
    """What all interleavings come to: the different ends, and what may be wrong.

    It says whether one is a deadlock, and whether a wait is missing.
    """

    ends: frozenset
    deadlock: bool
    unwaited: bool

    @property
    def right(self) -> bool:
        """Whether all interleavings end in the same way, and nothing is left unwaited for."""
        return not self.deadlock and not self.unwaited and len(self.ends) == 1


class Program(NamedTuple):
    """The steps of each rank."""

    steps: tuple

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.steps)


def starting_buffers(rank: int) -> tuple:
    """Return what the buffers of a rank hold at the start."""
    return tuple(100 * (rank + 1) + buffer for buffer in range(BUFFERS))


def right_program(draw: random.Random) -> Program:
    """Return a program that is right in the order in which its steps are drawn.

    They never wait and never touch a buffer on its way.
    """
    ranks = draw.randint(2, 3)
    steps: list = [[] for _ in range(ranks)]
    pending: list = []  # waits that are not in the program yet: (rank, step, buffer)
    in_use: list = [set() for _ in range(ranks)]
    for message in range(draw.randint(1, 4)):
        place_some_waits(draw, steps, pending, in_use)
        touch(draw, steps, in_use)
        source, target = draw.sample(range(ranks), 2)
        free_at_source = sorted(set(range(BUFFERS)) - in_use[source])
        free_at_target = sorted(set(range(BUFFERS)) - in_use[target])
        if not free_at_source or not free_at_target:
            continue
        out = draw.choice(free_at_source)
        into = draw.choice(free_at_target)
        steps[source].append(("send", message, out, target))
        steps[target].append(("receive", message, into, source))
        pending.append((source, ("wait", "send", message), out))
        pending.append((target, ("wait", "receive", message), into))
        in_use[source].add(out)
        in_use[target].add(into)
        touch(draw, steps, in_use)
    while pending:
        place_some_waits(draw, steps, pending, in_use)
        touch(draw, steps, in_use)
    return Program(tuple(map(tuple, steps)))


def place_some_waits(draw: random.Random, steps: list, pending: list, in_use: list) -> None:
    """Append the waits of some messages that are on their way; their buffers may be used again."""
    draw.shuffle(pending)
    for _ in range(draw.randint(0, len(pending))):
        rank, step, buffer = pending.pop()
        steps[rank].append(step)
        in_use[rank].discard(buffer)


def touch(draw: random.Random, steps: list, in_use: list) -> None:
    """Append a read and a write of buffers that are not on their way."""
    for rank, own in enumerate(steps):
        for buffer in set(range(BUFFERS)) - in_use[rank]:
            if draw.random() < 0.1:
                own.append(("write", buffer, draw.randint(1, 99)))
            if draw.random() < 0.1:
                own.append(("read", buffer))


def with_fault(draw: random.Random, program: Program) -> Program:
    """Return the program after one change that may be a fault.

    A step goes or moves, or all messages block.
    """
    steps = [list(own) for own in program.steps]
    own = draw.choice([of_rank for of_rank in steps if of_rank])
    step = own.pop(draw.randrange(len(own)))
    if draw.random() < 0.4:
        steps = [blocking(of_rank) for of_rank in program.steps]
    elif step[0] != "wait" or draw.random() < 0.6:
        own.insert(draw.randint(0, len(own)), step)
    if not makes_sense(steps):
        return with_fault(draw, program)
    return Program(tuple(map(tuple, steps)))


def with_race(draw: random.Random, program: Program) -> Program | None:
    """Return the program with one touch more, of a buffer between a post and its wait.

    Return None if it sends nothing.
    """
    steps = [list(own) for own in program.steps]
    posts = []
    for rank, own in enumerate(steps):
        for place, step in enumerate(own):
            if step[0] in ("send", "receive"):
                posts.append((rank, place))
    if not posts:
        return None
    rank, place = draw.choice(posts)
    own = steps[rank]
    kind, message, buffer, _ = own[place]
    touches = [("write", buffer, draw.randint(1, 99))]
    if kind == "receive":
        touches.append(("read", buffer))
    wait = own.index(("wait", kind, message))
    own.insert(draw.randint(place + 1, wait), draw.choice(touches))
    return Program(tuple(map(tuple, steps)))


def blocking(own: tuple) -> list:
    """Return the steps of a rank that waits for each of its sends at once.

    It posts each receive where it waits for it.
    """
    receives = {step[1]: step for step in own if step[0] == "receive"}
    steps: list = []
    for step in own:
        if step[0] == "send":
            steps += [step, ("wait", *step[:2])]
        elif step[:2] == ("wait", "receive"):
            steps += [receives[step[2]], step]
        elif step[0] in ("write", "read"):
            steps.append(step)
    return steps


def makes_sense(steps: list) -> bool:
    """Return whether on each rank every wait comes after its post."""
    for own in steps:
        posted = set()
        for step in own:
            if step[0] in ("send", "receive"):
                posted.add((step[0], step[1]))
            elif step[0] == "wait" and step[1:] not in posted:
                return False
    return True


class State(NamedTuple):
    """One moment of a run: places in the programs, buffers, sums, and what became of messages."""

    places: tuple
    buffers: tuple
    sums: tuple
    taken: tuple  # {message: the bytes that were read from the sender's buffer}, as pairs
    delivered: frozenset
    spoiled: bool = False


def all_interleavings(program: Program) -> Outcome:
    """Try every interleaving, on each network."""
    ends: set = set()
    deadlock = False
    for network in (BUFFERED, UNBUFFERED, CHECKING):
        for state in last_states(program, network):
            lengths = tuple(map(len, program.steps))
            if state.places == lengths:
                ends.add((state.buffers, state.sums, state.spoiled))
            else:
                deadlock = True
    return Outcome(frozenset(ends), deadlock, misses_a_wait(program))


def last_states(program: Program, network: int) -> list[State]:
    """Return all states that nothing can follow: the program has ended, or it has a deadlock."""
    start = State(
        places=(0,) * program.ranks,
        buffers=tuple(map(starting_buffers, range(program.ranks))),
        sums=(0,) * program.ranks,
        taken=(),
        delivered=frozenset(),
    )
    last = []
    reached = {start}
    todo = [start]
    while todo:
        state = todo.pop()
        following = list(successors(program, state, network))
        if not following:
            last.append(state)
        todo += [each for each in following if each not in reached]
        reached.update(following)
    return last


def misses_a_wait(program: Program) -> bool:
    """Return whether some send or receive has no wait."""
    posts = set()
    waits = set()
    for rank, own in enumerate(program.steps):
        for step in own:
            if step[0] in ("send", "receive"):
                posts.add((rank, step[0], step[1]))
            elif step[0] == "wait":
                waits.add((rank, step[1], step[2]))
    return waits != posts


def successors(program: Program, state: State, network: int) -> Any:
    """Yield the states that may follow.

    A rank makes a step, bytes are read, or bytes are delivered.
    """
    taken = dict(state.taken)
    sends, receives = posted(program, state)
    for message, (rank, buffer) in sends.items():
        if message not in taken:
            value = state.buffers[rank][buffer]
            yield state._replace(taken=tuple(sorted({**taken, message: value}.items())))
    for send, receive in matched(program):
        if send in taken and receive in receives and receive not in state.delivered:
            rank, buffer = receives[receive]
            spoiled = network == CHECKING and state.buffers[rank][buffer] != mark_of(receive)
            arrived = with_buffer(state, rank, buffer, taken[send])
            yield arrived._replace(
                delivered=state.delivered | {receive}, spoiled=state.spoiled or spoiled
            )
    for rank, own in enumerate(program.steps):
        if state.places[rank] < len(own):
            following = after_step(program, state, rank, own[state.places[rank]], network, taken)
            if following is not None:
                yield following._replace(places=changed(state.places, rank, state.places[rank] + 1))


def after_step(
    program: Program, state: State, rank: int, step: tuple, network: int, taken: dict
) -> State | None:
    """Return the state after a rank's step, but for its place; None if the step has to wait."""
    if step[0] == "write":
        buffer, number = step[1:]
        value = (3 * state.buffers[rank][buffer] + number) % MODULUS
        return with_buffer(state, rank, buffer, value)
    if step[0] == "read":
        total = (31 * state.sums[rank] + state.buffers[rank][step[1]]) % MODULUS
        return state._replace(sums=changed(state.sums, rank, total))
    if step[0] == "receive" and network == CHECKING:
        return with_buffer(state, rank, step[2], mark_of(step[1]))
    if step[0] == "send" and network == CHECKING:
        value = state.buffers[rank][step[2]]
        taken = {**taken, step[1]: value}
        spoiled = state.spoiled or value < 0
        return state._replace(taken=tuple(sorted(taken.items())), spoiled=spoiled)
    if step[0] != "wait":
        return state
    _, kind, message = step
    if kind == "receive":
        return state if message in state.delivered else None
    if network == CHECKING:
        (buffer,) = [each[2] for each in program.steps[rank] if each[:2] == ("send", message)]
        changed_meanwhile = state.buffers[rank][buffer] != taken[message]
        state = state._replace(spoiled=state.spoiled or changed_meanwhile)
    if network == BUFFERED:
        return state if message in taken else None
    partners = dict(matched(program))
    return state if message in partners and partners[message] in state.delivered else None


def posted(program: Program, state: State) -> tuple[dict, dict]:
    """Return the sends and the receives that were posted so far: {message: (rank, buffer)}."""
    sends = {}
    receives = {}
    for rank, own in enumerate(program.steps):
        for step in own[: state.places[rank]]:
            if step[0] in ("send", "receive"):
                kind = sends if step[0] == "send" else receives
                kind[step[1]] = rank, step[2]
    return sends, receives


def matched(program: Program) -> list[tuple]:
    """Return which send meets which receive: between two ranks, the first the first, and so on."""
    sends: dict = {}  # {(source, target): messages in the order in which they are posted}
    receives: dict = {}
    for rank, own in enumerate(program.steps):
        for step in own:
            if step[0] == "send":
                _, message, _, target = step
                sends.setdefault((rank, target), []).append(message)
            elif step[0] == "receive":
                _, message, _, source = step
                receives.setdefault((source, rank), []).append(message)
    pairs: list = []
    for way, messages in sends.items():
        pairs += zip(messages, receives.get(way, []), strict=False)
    return pairs


def mark_of(message: int) -> int:
    """Return what the checking network writes into a buffer that waits for a message.

    No program has a number below 0.
    """
    return -1 - message


def with_buffer(state: State, rank: int, buffer: int, value: int) -> State:
    """Return the state with another value in a buffer."""
    own = changed(state.buffers[rank], buffer, value)
    return state._replace(buffers=changed(state.buffers, rank, own))


def changed(row: tuple, place: int, value: Any) -> tuple:
    """Return the row with another value in one place."""
    return (*row[:place], value, *row[place + 1 :])


def play(program: Program, rank: int, send: Any, receive: Any, buffers: Any, total: Any) -> None:
    """Really run the steps of a rank, on float64 tensors.

    `send` and `receive` post and return what has a `wait`.
    """
    works = {}
    for step in program.steps[rank]:
        if step[0] in ("send", "receive"):
            post = send if step[0] == "send" else receive
            works[step[:2]] = post(buffers[step[2]], step[3])
        elif step[0] == "wait":
            works[step[1:]].wait()
        elif step[0] == "write":
            buffers[step[1]].mul_(3).add_(step[2]).remainder_(MODULUS)
        else:
            total.mul_(31).add_(buffers[step[1]]).remainder_(MODULUS)
