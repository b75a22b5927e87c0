"""Answers "how long would a step take?" in numbers, words, a picture, and a table's columns.

`predict(model="llama-3.1-8b", gpu="H100-80GB", gpus=64, way="fsdp")` takes what `runs.read_run`
reads. The part that bounds a step is the one which, made twice as fast, saves most.
"""

from dataclasses import dataclass, replace
from html import escape
from typing import Any, NamedTuple

from ddp_course.lab.showing.plots import Picture, name_rows, panels
from manyranks import presets

from .runs import read_run
from .transformers import Run, Step, memory_gb, mfu, step, tokens_per_s

# An answer calls these rates of a `Machine` by other names.
BOUNDS = {
    "peak": "products",
    "clock": "attention",
    "memory": "memory traffic",
    "nvlink": "links inside a host",
    "nics": "the network",
}
CLOSE = 0.05  # Ways whose steps differ by no more than this part are equally good.
USABLE = 0.95  # A choice takes at most this part of the memory, as not everything is counted.
COLOURS = {
    "products": "#0072B2",
    "attention": "#3B96CC",
    "memory": "#009E73",
    "launch": "#8C8C8C",
    "tensor": "#CC79A7",
    "sending that shows": "#D55E00",
    "bubble": "#C48400",
    "hidden sending": "#B98A5E",
}
SMALLER = "Try recompute=full, more tensor ways or more GPUs; --decide chooses what fits."


class ExpectedError(NamedTuple):
    """The errors on runs that no fit saw, and in words which runs these are."""

    median: float
    nine_in_ten: float
    runs: str


def expected_error(run: Run) -> ExpectedError:
    """Return the error that is to be expected of a run like this one.

    On A100s a whole model was left out of the fit (`make bench predictions`). On H100s these are
    the errors on the 52 runs in bfloat16 of llm-foundry's README (scripts/train/benchmarking), of
    which no row is in a table here.
    """
    usual_network = presets.ACCELERATORS[run.gpu].network
    # No table has a network much slower than its hosts usually have, and no narrower model.
    fast = run.in_one_host or not run.network or run.network >= usual_network / 4
    wide = run.hidden >= 768
    if fast and wide and run.pipeline == 1 and not run.inside and run.attention == "fused":
        if run.gpu.startswith("A100"):
            return ExpectedError(0.037, 0.11, "models left out of the fit, on A100s")
        if run.gpu == "H100":
            return ExpectedError(0.067, 0.11, "runs on H100s, which no fit saw")
    return ExpectedError(0.12, 0.35, "nothing like this was checked: a cautious guess")


@dataclass
class Answer:
    """A run with its step, its memory and what had to be assumed."""

    run: Run
    step: Step
    memory: dict[str, float]
    assumed: list[str]

    @property
    def step_s(self) -> float:
        """The seconds of a step."""
        return self.step.seconds

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """The tokens per second and GPU."""
        return tokens_per_s(self.run, self.step_s)

    @property
    def mfu(self) -> float:
        """The model flops utilization, as in PaLM."""
        return mfu(self.run, self.step_s)

    @property
    def memory_gb(self) -> float:
        """The GB that a GPU needs at least."""
        return sum(self.memory.values())

    @property
    def capacity_gb(self) -> float:
        """The GB that the GPU has."""
        return presets.ACCELERATORS[self.run.gpu].capacity_gb

    @property
    def fits(self) -> bool:
        """Whether the memory that is counted fits into the GPU."""
        return self.memory_gb <= self.capacity_gb

    @property
    def savings(self) -> dict[str, float]:
        """The part of the step that each thing would save if it were twice as fast."""
        machine = self.run.machine
        saved = {}
        for field, name in BOUNDS.items():
            faster = machine._replace(**{field: 2 * getattr(machine, field)})
            saved[name] = 1 - step(self.run, faster).seconds / self.step_s
        # No rate of a machine makes launching faster, and nothing hides it.
        saved["launching"] = self.step.parts["launch"] / 2 / self.step_s
        return saved

    @property
    def bound(self) -> str:
        """The thing that bounds the step: made twice as fast, it would save most."""
        savings = self.savings
        return max(savings, key=savings.__getitem__)

    def others(self) -> list["Answer"]:
        """Return answers for the same run by the other ways, the fastest first."""
        runs = [replace(self.run, way=way) for way in self.run.ways if way != self.run.way]
        return sorted(map(answer_of, runs), key=lambda answer: answer.step_s)

    def columns(self) -> dict[str, Any]:
        """Return the columns that a table gains."""
        fits = "yes" if self.fits else "no"
        return {
            "predicted_tokens_per_s_per_gpu": f"{self.tokens_per_s_per_gpu:.1f}",
            "step_s": f"{self.step_s:.5g}",
            "mfu": f"{self.mfu:.3f}",
            "memory_gb": f"{self.memory_gb:.1f}",
            "fits": fits,
            "bound": self.bound,
            "expected_error": f"{expected_error(self.run).median:.3f}",
        }

    def words(self) -> str:
        """Return the answer in sentences."""
        run = self.run
        parts = self.step.parts
        micro_batch = f"{run.accumulate} micro-batch(es) of {run.micro_batch} x {run.seq:,} tokens"
        lines = [f"{run.model}, {run.gpus} x {run.gpu}, {describe(run)}, {micro_batch}:"]
        verdict = "" if self.fits else "; IT DOES NOT FIT"
        lines.append(
            f"step {readable(self.step_s)} s, {readable(self.tokens_per_s_per_gpu)} tokens/s per "
            f"GPU, MFU {self.mfu:.0%} (as in PaLM: 6 N + 12 L s h), memory at least "
            f"{self.memory_gb:.0f} of {self.capacity_gb:.0f} GB{verdict}."
        )
        saved = max(self.savings.values())
        lines.append(
            f"Bound by {self.bound}: twice as fast, it would save {saved:.0%} of the step. "
            f"Products take {parts['products'] / self.step_s:.0%}, attention "
            f"{parts['attention'] / self.step_s:.0%}."
        )
        lines += self.sending_words()
        lines += self.way_words() if self.fits else [SMALLER]
        error = expected_error(run)
        lines.append(
            f"Expected error {error.median:.0%}, nine in ten within {error.nine_in_ten:.0%}"
            f" ({error.runs})."
        )
        if self.assumed:
            lines.append(f"Assumed: {'; '.join(self.assumed)}.")
        return "\n".join(lines)

    def sending_words(self) -> list[str]:
        """Return how much of the sending shows, and what another network would change, in words."""
        run = self.run
        # The sending of tensor ways is never hidden, and `sending` does not have it.
        tensor = self.step.parts["tensor"]
        sending = self.step.sending + tensor
        if not sending:
            return []
        shows = (self.step.parts["sending that shows"] + tensor) / self.step_s
        lines = [f"Sending takes {readable(sending)} s; it adds {shows:.0%} of the step."]
        if not run.in_one_host:
            slow_network = run.machine.nics * 8 / 10
            slow = step(replace(run, network=slow_network))
            saved = self.savings["the network"]
            lines.append(
                f"Twice the network saves {saved:.0%}; a tenth of it ({slow_network / 1e9:,.0f}"
                f" Gbit/s per host) makes the step {slow.seconds / self.step_s:.1f} times as long."
            )
        return lines

    def way_words(self) -> list[str]:
        """Return in words which other ways fit and are as fast, or faster."""
        near = []
        faster = []
        for other in self.others():
            if not other.fits:
                continue
            if abs(other.step_s / self.step_s - 1) <= CLOSE:
                near.append(other.run.way)
            elif other.step_s < self.step_s:
                numbers = f"{readable(other.step_s)} s ({other.memory_gb:.0f} GB)"
                faster.append(f"{other.run.way} {numbers}")
        lines = [f"Within {CLOSE:.0%}: {', '.join(near)}."] if near else []
        if faster:
            return [*lines, f"Faster: {', '.join(faster)}."]
        return [*lines, f"No other way that fits is {CLOSE:.0%} faster."]

    def figure(self) -> Picture:
        """Return a figure with a bar per way: its parts, error, hidden sending, and memory."""
        answers = [self, *self.others()]
        longest = max(other.step_s + other.step.hidden for other in answers)
        message = f"{self.run.way}: {readable(self.step_s)} s, bound by {self.bound}"
        with panels(
            rows=1,
            columns=2,
            width=10,
            height=1.6 + 0.42 * len(answers),
            message=message,
            description="Stacked bars of seconds, and bars of memory, by way",
            kind="derived",
            sharey=True,
            width_ratios=[2, 1],
        ) as (picture, (seconds, memory)):
            for row, other in enumerate(answers):
                draw_step(seconds, row, other)
                colour = "#0072B2" if other.fits else "#8C8C8C"
                memory.barh(row, other.memory_gb, color=colour, height=0.5)
            memory.axvline(self.capacity_gb, color="black", linestyle="--")
            memory.set_xlabel("GB per GPU, at least\n(dashed: its memory; grey: too much)")
            seconds.set_xlabel("seconds of a step; whisker: nine in ten such runs")
            seconds.set_xlim(0, 1.15 * longest)
            name_rows(seconds, [other.run.way for other in answers])
            handles = [seconds.barh(0, 0, color=colour) for colour in COLOURS.values()]
            picture.legend(handles, COLOURS, loc="outside lower center", ncols=4, fontsize=8)
        return picture

    def _repr_html_(self):
        return f"<pre>{escape(self.words())}</pre>"

    def __str__(self):
        return self.words()


def draw_step(axes: Any, row: int, other: Answer) -> None:
    """Draw the parts of a step in one bar with its expected error, and hidden sending below."""
    left = 0.0
    for name, seconds in other.step.parts.items():
        axes.barh(row, seconds, left=left, color=COLOURS[name], height=0.5)
        left += seconds
    axes.barh(row + 0.33, other.step.hidden, color=COLOURS["hidden sending"], height=0.12)
    error = expected_error(other.run).nine_in_ten * left
    axes.errorbar(left, row, xerr=error, color="black", capsize=3, linewidth=1)


def describe(run: Run) -> str:
    """Return a run's way in words, such as "fsdp, 8 tensor, 4 pipeline, recomputing"."""
    words = run.way
    if run.tensor > 1:
        words += f", {run.tensor} tensor"
    if run.pipeline > 1:
        words += f", {run.pipeline} pipeline"
    if run.recompute == 1:
        words += ", recomputing"
    elif run.recompute:
        words += ", recomputing in part"
    return words


def answer_of(run: Run, assumed: Any = ()) -> Answer:
    """Return the answer for a run."""
    return Answer(run, step(run), memory_gb(run), list(assumed))


def predict(**fields: Any) -> Answer:
    """Return how long a step takes, as an answer; `fields` are columns as `runs` reads them.

    Raises ValueError, which names a field that cannot be.
    """
    return answer_of(*read_run(fields))


def readable(value: float) -> str:
    """Return a number with three digits, and whole from 100 on: "0.29", "5.2", "3,460"."""
    rounds_to_100 = value >= 99.5
    return f"{value:,.0f}" if rounds_to_100 else f"{value:.3g}"
