"""Chooses the way of training for a model and a machine: the simplest that is nearly the fastest.

`decide` tries every way with tensor and pipeline ways, micro-batches and recomputing, keeps those
that fit into the USABLE part of the memory, and takes the simplest that is CLOSE to the fastest.
`score` compares the model's choices among published runs of the same work with blind choices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from ddp_course.lab.measuring import facts

from .answers import CLOSE, USABLE, Answer, answer_of, describe, readable
from .runs import RECOMPUTE, Reader, read_run
from .transformers import SHARDED, Run, step, tokens_per_s

COMPLEXITIES = {"ddp": 0, "zero1": 1, "zero2": 1, "fsdp": 1, "zero1 in host": 2, "hybrid": 2}
TENSOR_DEGREES = (1, 2, 4, 8)
MOST_STAGES = 64
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# `decide` chooses these itself; the values here are only read, and count for nothing.
DECIDED = {
    "way": "fsdp",
    "tensor": 1,
    "pipeline": 1,
    "micro_batch": 1,
    "accumulate": 1,
    "recompute": "none",
}


@dataclass
class Decision:
    """The `chosen` answer, None if nothing fits, and the best of `others`.

    Of all settings so many were `tried` and so many are `fitting`; the smallest needs `least_gb`.
    """

    chosen: Answer | None
    others: list[Answer]
    fitting: int
    tried: int
    least_gb: float

    def words(self) -> str:
        """Return the choice in sentences, with the reason why the next three were not taken."""
        if self.chosen is None:
            return (
                f"none of {self.tried:,} settings fits: the least needs {self.least_gb:,.0f} GB"
                " per GPU; take more or larger GPUs."
            )
        lines = [f"{self.fitting:,} of {self.tried:,} settings fit; the simplest fast one:"]
        lines.append(self.chosen.words())
        for other in self.others:
            run = other.run
            change = other.step_s / self.chosen.step_s - 1
            reason = f"{change:+.0%}"
            if complexity(run) > complexity(self.chosen.run):
                reason += ", more complicated"
            sizes = f"{run.accumulate} x {run.micro_batch} sequences"
            lines.append(f"next: {describe(run)}, {sizes}: {readable(other.step_s)} s ({reason})")
        return "\n".join(lines)

    def _repr_html_(self):
        return f"<pre>{self.words()}</pre>"


def complexity(run: Run) -> int:
    """Return 0 for DDP, 1 for a wrapper, 2 for one that knows hosts, and 2 more for each split."""
    splits = [degree for degree in (run.tensor, run.pipeline) if degree > 1]
    return COMPLEXITIES[run.way] + 2 * len(splits)


def settings(run: Run, batch: int) -> Iterator[Run]:
    """Yield every setting with `batch` sequences per step that this run's GPUs can have."""
    degrees = [tensor for tensor in TENSOR_DEGREES if run.inside_host % tensor == 0]
    most_stages = min(run.layers, MOST_STAGES)
    stages = [count for count in range(1, most_stages + 1) if run.layers % count == 0]
    for tensor, pipeline in product(degrees, stages):
        copies, left_over = divmod(run.gpus, tensor * pipeline)
        if left_over or run.heads % tensor or batch % copies:
            continue
        ways = [way for way in run.ways if pipeline == 1 or way not in SHARDED]
        if copies == 1:
            ways = ["ddp"]
        sequences = batch // copies
        sizes = [size for size in MICRO_BATCHES if sequences % size == 0]
        for way, size, recompute in product(ways, sizes, RECOMPUTE.values()):
            yield replace(
                run,
                tensor=tensor,
                pipeline=pipeline,
                way=way,
                micro_batch=size,
                accumulate=sequences // size,
                recompute=recompute,
            )


def decide(batch: Any = None, **fields: Any) -> Decision:
    """Return the choice of a way for a model, GPUs and `batch` sequences per step.

    Without a `batch` each GPU has 4 sequences. `fields` are columns as `runs` reads them; those in
    DECIDED are ignored. Raises ValueError for a batch that the GPUs cannot share.
    """
    run, assumed = read_run(fields | DECIDED)
    given = 4 * run.gpus if batch is None else batch
    sequences = Reader({"batch": given}).whole("batch")
    assumed.append(f"{sequences:,} sequences per step")
    answers = [answer_of(setting, assumed) for setting in settings(run, sequences)]
    if not answers:
        raise ValueError(f'"batch" is {sequences}; choose a multiple of the {run.gpus} GPUs')
    fitting = [answer for answer in answers if answer.memory_gb <= USABLE * answer.capacity_gb]
    least_gb = min(answer.memory_gb for answer in answers)
    if not fitting:
        return Decision(None, [], 0, len(answers), least_gb)
    fitting.sort(key=lambda answer: answer.step_s)
    near = [answer for answer in fitting if answer.step_s <= (1 + CLOSE) * fitting[0].step_s]
    # Of equally simple ones `min` takes the first, which is the fastest.
    chosen = min(near, key=lambda answer: complexity(answer.run))
    fastest_of_kind: dict[tuple, Answer] = {}
    for answer in fitting:
        kind = (answer.run.way, answer.run.tensor, answer.run.pipeline)
        fastest_of_kind.setdefault(kind, answer)
    others = [
        answer
        for answer in fastest_of_kind.values()
        if describe(answer.run) != describe(chosen.run)
    ]
    return Decision(chosen, others[:3], len(fitting), len(answers), least_gb)


class Score(NamedTuple):
    """How good choices are, in `groups` of runs of the same work.

    `within` is the part of the groups in which the choice is CLOSE to the best run, and `kept` the
    part of the best run's speed that it keeps, on average; the other two are the same for blind
    choices.
    """

    groups: int
    within: float
    kept: float
    blind_within: float
    blind_kept: float


def score() -> Score:
    """Return how well the model chooses among published runs of the same work.

    The same work is one model on as many GPUs, with sequences as long and as many tokens per step.
    A blind choice takes any run of a group. A way that nobody published is not scored.
    """
    # Each work has its ways, each with the measured speeds; a way begins with its predicted speed.
    groups: dict[tuple, dict[tuple, list[float]]] = {}
    for row in facts.rows("transformer_throughput"):
        run, _ = read_run(row)
        predicted = tokens_per_s(run, step(run).seconds)
        tokens = run.tokens * run.accumulate * run.data
        work = (run.model.split(" ")[0], run.gpu, run.gpus, run.seq, tokens)
        way = (predicted, run.way, run.tensor, run.recompute, run.micro_batch)
        measured = groups.setdefault(work, {}).setdefault(way, [])
        measured.append(row["tokens_per_s_per_gpu"])
    kept = []
    blind_kept = []
    blind_within = []
    for group in groups.values():
        if len(group) < 2:
            continue
        # The model chooses the way with the highest predicted speed.
        choice = fmean(group[max(group)])
        speeds = list(map(fmean, group.values()))
        best = max(speeds)
        kept.append(choice / best)
        blind_kept.append(fmean(speed / best for speed in speeds))
        blind_within.append(fmean(speed >= (1 - CLOSE) * best for speed in speeds))
    within = fmean(speed >= 1 - CLOSE for speed in kept)
    return Score(len(kept), within, fmean(kept), fmean(blind_within), fmean(blind_kept))
