"""Which way of training for which model and machine: the simplest that is nearly the fastest.

`decide` tries every way with tensor and pipeline ways, micro-batches and recomputing, keeps what
fits with a twentieth of the memory left, and takes the simplest within 5 % of the fastest. `score`
lets the model choose among published runs of the same work, beside a blind choice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from ddp_course.measuring import facts

from .answers import CLOSE, ROOM, Answer, answer_of, describe, readable
from .runs import Reader, read_run
from .transformers import SHARDED, WAYS, Run, step, tokens_per_s

SIMPLE = {"ddp": 0, "zero1": 1, "zero2": 1, "fsdp": 1, "zero1 in host": 2, "hybrid": 2}
SIZES = (1, 2, 4, 8, 16, 32)
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
    """The `chosen` answer or None, the next ones, how many settings fit, and the least memory."""

    chosen: Answer | None
    others: list[Answer]
    fitting: int
    tried: int
    least_gb: float

    def words(self) -> str:
        """The choice in sentences, with the reason why the next three were not taken."""
        if self.chosen is None:
            needs = f"none of {self.tried:,} settings fits: the least needs {self.least_gb:,.0f} GB"
            return f"{needs} per GPU; take more or larger GPUs."
        lines = [f"{self.fitting:,} of {self.tried:,} settings fit; the simplest fast one:"]
        lines.append(self.chosen.words())
        for other in self.others:
            change = other.step_s / self.chosen.step_s - 1
            simpler = complexity(other.run) <= complexity(self.chosen.run)
            reason = f"{change:+.0%}"
            if not simpler:
                reason += ", more complicated"
            run = other.run
            sizes = f"{run.accumulate} x {run.micro_batch} sequences"
            lines.append(f"next: {describe(run)}, {sizes}: {readable(other.step_s)} s ({reason})")
        return "\n".join(lines)

    def _repr_html_(self):
        return f"<pre>{self.words()}</pre>"


def complexity(run: Run) -> int:
    """0 for DDP, 1 for a wrapper, 2 for one that knows hosts; tensor ways and stages add 2."""
    split = [ways for ways in (run.tensor, run.pipeline) if ways > 1]
    return SIMPLE[run.way] + 2 * len(split)


def settings(run: Run, batch: int) -> Iterator[Run]:
    """Every setting with `batch` sequences per step that this run's GPUs can have."""
    tensors = [ways for ways in SIZES[:4] if run.inside_host % ways == 0]
    stages = [ways for ways in range(1, min(run.layers, 64) + 1) if run.layers % ways == 0]
    for tensor, pipeline in product(tensors, stages):
        data, rest = divmod(run.gpus, tensor * pipeline)
        if rest or run.heads % tensor or batch % data:
            continue
        ways = [way for way in WAYS if pipeline == 1 or way not in SHARDED]
        if run.gpus <= run.inside_host:
            ways = [way for way in ways if way not in ("hybrid", "zero1 in host")]
        if data == 1:
            ways = ["ddp"]
        each = batch // data
        sizes = [size for size in SIZES if each % size == 0]
        for way, size, recompute in product(ways, sizes, (0.0, 0.5, 1.0)):
            yield replace(
                run,
                tensor=tensor,
                pipeline=pipeline,
                way=way,
                micro_batch=size,
                accumulate=each // size,
                recompute=recompute,
            )


def decide(batch: Any = None, **fields: Any) -> Decision:
    """Choose the way for a model, GPUs and `batch` sequences per step; without it each GPU has 4.

    `fields` are columns as `runs` reads them; what is DECIDED is not read from them. Raises
    ValueError for a batch that the GPUs cannot share.
    """
    run, assumed = read_run(fields | DECIDED)
    given = 4 * run.gpus if batch is None else batch
    batch = Reader({"batch": given}).whole("batch")
    assumed.append(f"{batch:,} sequences per step")
    answers = [answer_of(setting, assumed) for setting in settings(run, batch)]
    if not answers:
        raise ValueError(f'"batch" is {batch}; choose a multiple of the {run.gpus} GPUs')
    fitting = [each for each in answers if each.memory_gb <= ROOM * each.capacity_gb]
    least = min(each.memory_gb for each in answers)
    if not fitting:
        return Decision(None, [], 0, len(answers), least)
    fastest = min(each.step_s for each in fitting)
    near = [each for each in fitting if each.step_s <= (1 + CLOSE) * fastest]
    chosen = min(near, key=lambda each: (complexity(each.run), each.step_s))
    best: dict[str, Answer] = {}
    for each in sorted(fitting, key=lambda each: each.step_s):
        best.setdefault(f"{each.run.way} {each.run.tensor} {each.run.pipeline}", each)
    kinds = [each for each in best.values() if describe(each.run) != describe(chosen.run)]
    return Decision(chosen, kinds[:3], len(fitting), len(answers), least)


class Score(NamedTuple):
    """Of `groups` of runs of the same work: the part within 5 % of the best, and the speed kept."""

    groups: int
    within: float
    kept: float
    blind_within: float
    blind_kept: float


def score() -> Score:
    """How well the model chooses among published runs of the same work: one model on as many GPUs,
    with sequences as long and as many tokens per step.

    A blind choice takes any run of a group. What nobody published is not scored.
    """
    groups: dict[tuple, dict[tuple, list[tuple[float, float]]]] = {}
    for row in facts.rows("transformer_throughput"):
        run, _ = read_run(row)
        predicted = tokens_per_s(run, step(run).seconds)
        tokens = run.tokens * run.accumulate * run.data
        work = (run.model.split(" ")[0], run.gpu, run.gpus, run.seq, tokens)
        way = (run.way, run.tensor, run.recompute, run.micro_batch)
        pair = (predicted, row["tokens_per_s_per_gpu"])
        groups.setdefault(work, {}).setdefault(way, []).append(pair)
    kept = []
    blind_kept = []
    blind_within = []
    for group in groups.values():
        ways = []
        for pairs in group.values():
            predicted, _ = pairs[0]  # All runs of one way have one prediction.
            ways.append((predicted, fmean(measured for _, measured in pairs)))
        if len(ways) < 2:
            continue
        speeds = [measured for _, measured in ways]
        best = max(speeds)
        _, speed_of_choice = max(ways)
        kept.append(speed_of_choice / best)
        blind_kept.append(fmean(speed / best for speed in speeds))
        blind_within.append(fmean(speed >= (1 - CLOSE) * best for speed in speeds))
    within = fmean(speed >= 1 - CLOSE for speed in kept)
    return Score(len(kept), within, fmean(kept), fmean(blind_within), fmean(blind_kept))
