"""What several exercises draw, forbid and require, and a ring all-reduce that notes its calls."""

import dis
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ddp_course import collectives, wire
from ddp_course.lab.folders import course_folder
from ddp_course.stage4_ring import ring_all_reduce
from ddp_exercises.attempt import groups
from ddp_exercises.diagnosis import kind_of
from ddp_exercises.errors import Wrong
from manyranks.torch_inside import around

LAST_THREE = -3  # The group of the last three of four ranks has this size for `worlds`.
COPIED = 10  # So many words in a row, equal to a lesson's, are no learner's own.
# Dotted names of functions that would be the answer; each names the module that defines it.
SERVER = (
    "ddp_course.stage3_paramserver.average_on_server",
    "ddp_course.stage3_paramserver.collect_and_return",
    "ddp_course.stage3_paramserver.broadcast_parameters",
)
OTHER_ALGORITHMS = tuple(
    f"{getattr(collectives, name).__module__}.{name}" for name in collectives.__all__
)
RING = (
    *OTHER_ALGORITHMS,
    "ddp_course.stage4_ring.ring_all_reduce",
    "ddp_course.stage4_ring.whole_gradient_ring",
    "ddp_course.stage4_ring.reduce_scatter",
    "ddp_course.stage4_ring.allgather",
    "ddp_course.stage4_ring.average_on_ring",
)


def worlds(*sizes: int) -> Iterator[tuple[int, Any]]:
    """Yield (size, group of the first ranks) for each of the `sizes` whose group this rank is in.

    A size below 0 means the last ranks: LAST_THREE of four are 1, 2 and 3 of the job.
    """
    for size in sizes:
        ranks = range(dist.get_world_size())
        members = ranks[size:] if size < 0 else ranks[:size]
        if dist.get_rank() in members:
            yield len(members), groups[size]


def noted_ring(group: Any) -> tuple[Callable, list]:
    """Return the ring all-reduce in a group, and a list of what it is called with.

    The list gets (dtype, number of elements) of each tensor. Like torch's own, the ring sums in
    place and returns nothing.
    """
    calls: list = []

    def all_reduce(tensor: torch.Tensor, group: Any = group) -> None:
        require(
            isinstance(tensor, torch.Tensor),
            f"all_reduce takes a tensor, not {tensor!r:.40}: make one of it, such as torch.tensor(5.0)",
        )
        calls.append((str(tensor.dtype).removeprefix("torch."), tensor.numel()))
        ring_all_reduce(tensor, group)

    return all_reduce, calls


@contextmanager
def noted_messages(group: Any) -> Iterator[tuple[list, list]]:
    """Yield two lists that grow within this block.

    One has this rank's events on the wire, the other for each message whether it went by another
    group than this one.
    """
    events: list = []
    astray: list = []

    def note(
        make: Callable, transfer: Any, kind: str, tensor: Any, peer: int, by: Any = None
    ) -> None:
        astray.append(by is not group)
        make(transfer, kind, tensor, peer, by)

    # When a message leaves, no line of this file is among those that led to it.
    with wire.observing(events.append), around(wire.Transfer, "__init__", note):
        yield events, astray


ASKS_ALL_RANKS = (
    "rank and number of ranks are asked for without `group`, and are those of the whole job: hand `group` on"
    " to every function that takes it"
)


@contextmanager
def noted_questions(group: Any) -> Iterator[list]:
    """Yield a list that is not empty once somebody asked for a rank or a size of all ranks.

    For a group of all ranks it stays empty.
    """
    asked: list = []

    def note(ask: Callable, of: Any = None) -> int:
        asker = sys._getframe(2).f_globals["__name__"]
        # What watches the answer may ask about all ranks.
        if of is None and not asker.startswith(("manyranks.", "ddp_exercises.")):
            asked.append(ask)
        return ask(of)

    if dist.get_world_size(group) == dist.get_world_size():
        yield asked
        return
    with around(dist, "get_rank", note), around(dist, "get_world_size", note):
        yield asked


def fault_of_group(astray: list) -> str:
    """Return in words that messages went by another group than the one given; else ""."""
    if not any(astray):
        return ""
    return (
        f"{sum(astray)} of {len(astray)} go by another group, of all ranks: hand `group` on to every"
        " function of the wire"
    )


def addresses(tensors: Iterable) -> list[int]:
    """Return where in memory each tensor begins."""
    return [tensor.data_ptr() for tensor in tensors]


def moved(before: list[int], tensors: Iterable) -> str:
    """Return in words that tensors have another memory than `before` (their addresses); else ""."""
    if addresses(tensors) == before:
        return ""
    return (
        "it is in new memory, as by `.data =`, and whoever holds a part of the old one never sees it:"
        " write into the tensor itself, as by copy_"
    )


NOTHING_RETURNED = {
    "NoneType": "None is used as if it were a tensor: what sums in place returns nothing, and the sum is in"
    " the tensor that was handed over"
}
MOST_MESSAGES = 64  # From one rank to another so many are compared.
ONE_TENSOR = "a message is one tensor: hand over a tensor, such as chunks[i], not a list of them"
NO_TENSOR = {
    "'list' object has no attribute 'is_cuda'": ONE_TENSOR,
    "'tuple' object has no attribute 'is_cuda'": ONE_TENSOR,
}


def unequal_lengths(events: list, group: Any) -> str:
    """Return in words a message that was received into a tensor of another length; else "".

    `events` are what each rank of a group has observed. gloo lets a longer tensor pass. All ranks
    of the group call it, and get the same words. Messages that one side did not wait for are not
    compared.
    """
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    members = dist.get_process_group_ranks(group)
    lengths = torch.zeros(2, size, size, MOST_MESSAGES, dtype=torch.int64)
    sent, received = lengths
    for event in events:
        if event.kind == "span":
            continue
        require(
            event.peer in members,
            f"a message between rank {members[rank]} and rank {event.peer}, but the group is ranks"
            f" {members}: is `group` passed on?",
        )
        peer = members.index(event.peer)
        row = sent[rank, peer] if event.kind == "send" else received[peer, rank]
        free = (row == 0).nonzero()
        if len(free):
            row[free[0]] = event.bytes
    ring_all_reduce(lengths, group)
    sent, received = lengths.sort(descending=True).values
    as_many = (sent > 0).sum(-1) == (received > 0).sum(-1)
    for sender, receiver, place in ((sent != received) & as_many[..., None]).nonzero().tolist():
        return (
            f"rank {receiver} receives {sent[sender, receiver, place]} bytes from rank {sender} into a tensor of"
            f" {received[sender, receiver, place]}: gloo lets that pass, NCCL does not; a tensor is as long as"
            " what comes into it"
        )
    return ""


@contextmanager
def in_words(causes: dict[str, str]) -> Iterator[None]:
    """Raise Wrong with a cause where an error's type or message contains one of these pieces."""
    try:
        yield
    except Exception as error:
        for words, cause in causes.items():
            if words in f"{type(error).__name__}: {error}":
                raise Wrong(cause) from error
        raise


def as_sum(tensor: torch.Tensor, of_ranks: list) -> str | None:
    """Return in words which sum of the tensors that the ranks began with (`of_ranks`) a tensor is.

    An example is "rank 0's + 1/3 of rank 2's". None if it is no simple sum of these: then its
    numbers say more.
    """
    columns = [part.detach().reshape(-1).double() for part in of_ranks]
    goal = tensor.detach().reshape(-1).double()
    if len(goal) < len(columns) or len(goal) != len(columns[0]) or not goal.isfinite().all():
        return None
    matrix = torch.stack(columns, dim=1)
    factors = torch.linalg.lstsq(matrix, goal[:, None]).solution[:, 0]
    rounding = 1e-6 * matrix.abs().max().item()
    if not (matrix @ factors).allclose(goal, rtol=1e-5, atol=rounding):
        return None
    terms = []
    for rank, factor in enumerate(factors.tolist()):
        # Answers divide by numbers of ranks, and by their products, so a simple factor has a small
        # denominator.
        simple = Fraction(factor).limit_denominator(64)
        if abs(simple - factor) > 1e-5:
            return None
        if simple == 1:
            terms.append(f"rank {rank}'s")
        elif simple:
            terms.append(f"{simple} of rank {rank}'s")
    return " + ".join(terms) or "zeros"


def copied_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a parameter's gradient; None where there is none."""
    return None if parameter.grad is None else parameter.grad.clone()


def tensors(
    random: Any, count: int, *shape: int, dtype: torch.dtype = torch.float32, whole: bool = False
) -> list:
    """Return `count` tensors of `shape`, all different; whole numbers if sums are to be exact."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    made = []
    for _ in range(count):
        if whole:
            tensor = torch.randint(-999, 999, shape, generator=generator)
        else:
            tensor = torch.randn(*shape, generator=generator, dtype=torch.float64)
        made.append(tensor.to(dtype))
    return made


def require(condition: Any, message: str) -> None:
    """Raise Wrong with `message` unless `condition` holds."""
    if not condition:
        raise Wrong(message)


def require_written(*methods: Callable) -> None:
    """Raise NotImplementedError for a method that has nothing but `...` or `pass` in it."""
    empty = instructions(lambda: None)
    for method in methods:
        if instructions(method) == empty:
            raise NotImplementedError(f"{method.__name__} has nothing but ... in it")


def instructions(function: Callable) -> list[str]:
    """Return the names of a function's instructions."""
    return [instruction.opname for instruction in dis.get_instructions(function)]


def different_words(sentence: Any) -> int:
    """Return how many different words a sentence has.

    Numbers, single letters and names with digits, such as float16, are none.
    """
    words = {word for word in words_in(str(sentence)) if len(word) > 1}
    return sum(word.isalpha() for word in words)


def nothing(random: Any) -> dict:
    """The inputs of a task that takes none."""
    return {}


def as_it_is(answer: Callable) -> Iterator[tuple]:
    """Yield what an answer without arguments returns."""
    yield "", "returned", answer()


def require_explanation(text: Any) -> None:
    """Raise Wrong where a text is too short to explain a figure, names no number, or is a lesson's."""
    words = different_words(text)
    require(words >= 12, f"a text of at least twelve different words was expected, not of {words}")
    # The digits of a name, such as float16, are no number.
    named = re.search(r"\b\d", str(text))
    require(named, "name a number of the figure in your text, in digits, such as 25 %")
    own_words = words_in(str(text))
    for place in range(len(own_words) - COPIED + 1):
        run = " ".join(own_words[place : place + COPIED])
        require(
            f" {run} " not in lessons_as_words(),
            f'"{run}": this stands in a lesson; explain the figure in words of your own',
        )


def words_in(text: str) -> list[str]:
    """Return the words and numbers of a text, in small letters."""
    return re.findall(r"[^\W_]+", text.lower())


@cache
def lessons_as_words() -> str:
    """Return what all lessons say, in texts, code, outputs and figures, as words between spaces."""
    texts = []
    for path in sorted(course_folder("notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            texts += cell["source"]
            for output in cell.get("outputs", ()):
                texts += output.get("data", {}).get("text/plain", ())
                caption = output.get("metadata", {}).get("image/png", {}).get("alt", "")
                texts.append(f" {caption} ")
    return f" {' '.join(words_in(''.join(texts)))} "


def form_of_explanation(returned: list) -> Iterator[tuple]:
    """Evidence of a figure's explanation: the form of (text, letters of the points that it makes).

    What the text says is for a person to read.
    """
    pair = 'a pair was expected: (your text, the letters that you tick, such as "AB")'
    text, ticked = several(returned[0], 2, pair)
    joined = "".join(map(str, ticked))
    letters = sorted(set(re.sub(r"[\s,]", "", joined).upper()))
    require_explanation(text)
    yield "text", "its form", "as asked"
    words = different_words(text)
    unknown = [letter for letter in letters if letter not in ("A", "B", "C")]
    require(not unknown, f"{', '.join(map(repr, unknown))} is none of A, B and C")
    require(letters, "tick at least one letter: what does your text say?")
    each = f"{len(letters)} points in {words} different words: tick only what your text really says"
    require(words >= 12 * len(letters), each)
    yield "ticks", "their form", "as asked"


def several(answer: Any, count: int, message: str) -> Any:
    """Return the answer if it is a list or tuple of `count` things; else raise Wrong.

    The error has `message`, and what the answer is.
    """
    is_list = isinstance(answer, list | tuple)
    kind = kind_of(answer)
    if is_list:
        kind += f" of {len(answer)}"
    require(is_list and len(answer) == count, f"{message} (yours is {kind})")
    return answer
