"""What several exercises draw, forbid and require, and a ring that notes what it is called with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from ddp_course import collectives
from ddp_course.checking.attempt import groups
from ddp_course.checking.diagnosis import kind_of
from ddp_course.errors import Wrong
from ddp_course.stage4_ring import ring_all_reduce

SERVER = tuple(
    f"ddp_course.stage3_paramserver.{name}"
    for name in ("average_on_server", "collect_and_return", "broadcast_parameters")
)
OTHER_ALGORITHMS = tuple(
    f"{vars(collectives)[name].__module__}.{name}" for name in collectives.__all__
)
RING = OTHER_ALGORITHMS + tuple(
    f"ddp_course.stage4_ring.{name}"
    for name in (
        "ring_all_reduce",
        "whole_gradient_ring",
        "reduce_scatter",
        "allgather",
        "average_on_ring",
    )
)


def worlds(*sizes: int) -> Iterator[tuple[int, Any]]:
    """Yield (size, group) of the first 2, 3, … ranks to their members."""
    for size in sizes:
        if dist.get_rank() < size:
            yield size, groups[size]


def noted_ring(group: Any) -> tuple[Callable, list]:
    """The ring all-reduce in a group, and a list of (dtype, elements) of the tensors that it is
    called with.
    """
    calls: list = []

    def all_reduce(tensor: torch.Tensor, group: Any = group) -> torch.Tensor:
        require(
            isinstance(tensor, torch.Tensor),
            f"all_reduce takes a tensor, not {tensor!r:.40}: make one of it, such as torch.tensor(5.0)",
        )
        calls.append((str(tensor.dtype).removeprefix("torch."), tensor.numel()))
        return ring_all_reduce(tensor, group)

    return all_reduce, calls


@contextmanager
def in_words(causes: dict[str, str]) -> Iterator[None]:
    """Where an error's message has certain words in it, raise Wrong with its cause instead."""
    try:
        yield
    except Exception as error:
        for words, cause in causes.items():
            if words in str(error):
                raise Wrong(cause) from error
        raise


def as_sum(tensor: torch.Tensor, of_ranks: list) -> str | None:
    """In words, what a tensor is made of, such as "rank 0's + 1/3 of rank 2's", for the tensors
    that the ranks began with. None if it is no simple sum of these: then its numbers say more.
    """
    columns = [part.detach().reshape(-1).double() for part in of_ranks]
    goal = tensor.detach().reshape(-1).double()
    if len(goal) < len(columns) or len(goal) != len(columns[0]) or not goal.isfinite().all():
        return None
    parts = torch.stack(columns, 1)
    factors = torch.linalg.lstsq(parts, goal[:, None]).solution[:, 0]
    size = 1e-6 * parts.abs().max().item()
    if not (parts @ factors).allclose(goal, 1e-5, size):
        return None
    terms = []
    for rank, factor in enumerate(factors.tolist()):
        simple = Fraction(factor).limit_denominator(64)
        if abs(simple - factor) > 1e-5:
            return None
        if simple == 1:
            terms.append(f"rank {rank}'s")
        elif simple:
            terms.append(f"{simple} of rank {rank}'s")
    return " + ".join(terms) or "zeros"


def copied_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """A copy of a parameter's gradient; None where there is none."""
    return None if parameter.grad is None else parameter.grad.clone()


def tensors(
    random: Any, count: int, *shape: int, dtype: torch.dtype = torch.float32, whole: bool = False
) -> list:
    """`count` tensors of `shape`, all different; whole numbers if sums are to be exact."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    if whole:
        return [
            torch.randint(-999, 999, shape, generator=generator).to(dtype) for _ in range(count)
        ]
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(count)
    ]


def require(condition: Any, message: str) -> None:
    """Raise Wrong with `message` unless `condition` holds."""
    if not condition:
        raise Wrong(message)


def several(answer: Any, count: int, message: str) -> Any:
    """The answer, if it is a row of `count` things; else raise Wrong with `message` and what it
    is.
    """
    is_row = isinstance(answer, list | tuple)
    kind = kind_of(answer)
    if is_row:
        kind += f" of {len(answer)}"
    require(is_row and len(answer) == count, f"{message} (yours is {kind})")
    return answer
