"""`python -m benchmarks gpu`: what only a machine with GPUs shows, in at most ten minutes.

Is every stage right there, with races made likely? Does the preloaded server survive CUDA, do
failures name the culprit, does nothing stay on the device? How long is a step of stage 6 beside
torch's, and how much memory does it take? With `--device cpu` the same runs without a GPU, as
far as that is possible. At the end stands one table: right, safe, fast, each row "yes", "no" or
"not checked here, because …"; it is `answers` in results/gpu.json. It needs torch (2.10 or newer),
NumPy, cloudpickle and tqdm: `python -m benchmarks gpu` in the checkout; matplotlib draws.
"""

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_course import ladder, problems
from ddp_course.base.files import replace_file, writable_folder
from ddp_course.base.torch_private import busy_gpu
from ddp_course.lab.measuring import comparison
from ddp_course.lab.measuring.on_your_gpus import on_your_gpus
from ddp_course.stage6_ddp import DistributedDataParallel
from manyranks.devices import rank_device
from manyranks.devices.placement import nccl_can_share, placement, usable_gpus
from manyranks.errors import LaunchError, LaunchTimeout, RankError
from manyranks.launching.launch import launch

from .harness import (
    Benchmark,
    Part,
    Promise,
    Row,
    promises_of_ratios,
    table,
    take_turns,
    timed,
)
from .scaling import all_reduces, figures, finished, scaling, traced
from .training import Model, model_and_batch, step

ONE_GPU = "NCCL wants a GPU for each of two ranks"
UNDER_NCCL = ("a rank killed in mid-collective", "a rank that never comes")
EXACT = 1e-12
# Times torch's: every step, steps on average, and memory.
EACH = 1.05
STEP_RATIO = 1.02
MEMORY_RATIO = 1.05
LARGE = 100_000_000  # The model that is timed has so many parameters.
SMALL = 1_000_000  # A model of so many parameters is for trying the command.
FEW = 8  # With so few samples the GPU waits for Python.
ENOUGH = 64  # With these Python waits for the GPU.
# Stage 6's hooks are Python and torch's are C++: where the GPU waits, 13 µs a parameter show.
WAITING = 1.15
# This problem needs no file of data.
VECTORS = {
    "parameters": 12 * 64**2,  # There are layers for a pipeline of eight ranks.
    "width": 64,
}
NOT_ON_THE_CPU = {  # On a CPU each part says what it cannot look at.
    "exactness": (
        "Not looked at without a GPU: NCCL, streams, late gradients, a training stream of its own."
    ),
    "safety": (
        "Not looked at without a GPU: CUDA in the caller, CUDA contexts of CPU ranks, processes"
        " left on a GPU."
    ),
    "steps": "Not looked at without a GPU: a GPU's step times and memory; these are a processor's.",
    "own_tests": "Not looked at without a GPU: what these tests test; they are skipped.",
}
NOT_ASKED = "it was not asked for, or a package is missing"
SEVERAL = "it needs several GPUs"
WEAK = 0.7  # On all GPUs a step may take 1 / 0.7 times as long as on one, each with its own batch.
NOTHING_LEFT = "no process is left on a GPU"
MARK = "@pytest.mark.cuda"  # Only files with such tests are collected.
CYCLES = 2_000_000  # This is about a millisecond of a GPU's time.


def world_sizes(device: str) -> list[int]:
    """Return the world sizes, of 1, 2, 4 and 8, whose ranks can have a GPU each; 2 on the CPU."""
    return [2] if device == "cpu" else [count for count in (1, 2, 4, 8) if count <= usable_gpus()]


def exactness(args: argparse.Namespace) -> Part:
    """Compare each stage's weights with stage 1's in float64: on one device, and on a GPU each."""
    rows: list[Row] = []
    for where, counts, asked in placements(args.device):
        for world_size in counts:
            with patch.dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE=asked):
                backend = placement(where, world_size)[0]
                far = launch(distances, world_size=world_size, device=where, timeout=180)
            setting = {"device": where, "backend": backend, "world_size": world_size}
            for key in far[0]:
                furthest = max(each[key] for each in far)
                rows.append({**setting, "stage": key, "distance": furthest})
    largest = max(row["distance"] for row in rows)
    return Part(rows, [Promise("distance to one device's weights, largest", largest, EXACT)])


def placements(device: str) -> list[tuple[str, list[int], str]]:
    """Return (device, numbers of ranks, whether NCCL is asked to let ranks share a GPU).

    gloo lets them do so anyway.
    """
    if device == "cpu":
        return [("cpu", [2, 4], "0")]
    shared = [("cuda:0", [2, 4], "1")] if nccl_can_share() else []
    return [("cuda:0", [2, 4], "0"), ("cuda", world_sizes("cuda"), "0"), *shared]


def distances() -> dict[str, float]:
    """On each rank, train with every stage on a busy device; return distances from stage 1."""
    # Ranks print cuBLAS warnings without this setting.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    problem = problems.make("synthetic", dtype=torch.float64, device=rank_device(), **VECTORS)
    world_size = dist.get_world_size()
    single = problem.model(0)
    distance = {}
    ladder.find("1").trainer({})(single, problem.batches(24, 3, 0, 0, 1), 0.1)
    for key, stage in ladder.STAGES.items():
        if stage.one_process or key == "torch":
            continue  # torch's DDP waits for gloo by a future, which knows only the default stream.
        model = problem.model(0)
        mine = (dist.get_rank(), world_size) if stage.splits_batch else (0, 1)
        with races(() if key == "9" else model.parameters()):  # Stage 9 splits no layer with hooks.
            stage.trainer({"bucket_cap_mb": 0.1})(model, problem.batches(24, 3, 0, *mine), 0.1)
        pairs = zip(model.parameters(), single.parameters(), strict=True)
        distance[key] = max((weight - other).abs().max().item() for weight, other in pairs)
    return distance


@contextmanager
def races(parameters: Iterable[torch.nn.Parameter]) -> Any:
    """Make wrong orders visible on a GPU.

    The gradients of `parameters` come late, and the training itself runs on a stream of its own.
    """
    if rank_device().type != "cuda":
        yield
        return
    for parameter in parameters:
        parameter.register_hook(lambda gradient: busy_gpu(CYCLES))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.synchronize()


def safety(args: argparse.Namespace) -> Part:
    """Try what may fail; return the seconds until each failure was reported, and how."""
    device = args.device
    if device == "cuda" and usable_gpus() == 1:
        device = "cuda:0"
    backend = "gloo"
    if "nccl" in placement(device, 2)[0]:
        backend = "NCCL"
    torch.ones(1, device=device)  # This process must be on the GPU, too, when `mine` is listed.
    mine = processes_on_gpus()
    rows: list[Row] = []
    for name, check in safety_checks(device).items():
        began = time.perf_counter()
        right = check()
        seconds = time.perf_counter() - began
        rows.append(
            {"check": name, "backend": backend, "as it should be": right, "seconds": seconds}
        )
    if device != "cpu":
        time.sleep(1.0)  # The driver lists a process for a moment after its end.
        left: bool | None = not processes_on_gpus() - mine
        if not mine:
            left = None  # nvidia-smi does not even list this process.
        rows.append(
            {
                "check": NOTHING_LEFT,
                "backend": backend,
                "as it should be": left,
                "seconds": 0.0,
            }
        )
    wrong = sum(row["as it should be"] is False for row in rows)
    return Part(rows, [Promise("checks that failed", wrong, at_most=0)])


def safety_checks(device: str) -> dict[str, Callable[[], bool]]:
    """Return each check of `safety` by its name; it says whether all was as it should be."""
    failing = partial(raises_with, RankError)
    checks: dict[str, Callable[[], bool]] = {
        "out of memory in one rank": partial(failing, "rank 1", out_of_memory, device),
        "a rank killed in mid-collective": partial(failing, "killed: by SIGKILL", killed, device),
        "a rank that never comes": partial(
            raises_with, LaunchTimeout, "", absent, device, timeout=8
        ),
    }
    if device != "cpu":
        checks["CUDA in the caller, then two launches"] = partial(after_cuda_in_the_caller, device)
        checks["CPU ranks open no CUDA context"] = no_context
    return checks


def processes_on_gpus() -> set[str]:
    """Return the ids of the processes that nvidia-smi sees on GPUs; none without that program.

    A container numbers them differently.
    """
    try:
        asked = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        printed = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(printed.split())


def after_cuda_in_the_caller(device: str) -> bool:
    """Return whether ranks can use the device when CUDA is already up in the launching process."""
    torch.ones(1, device=device)
    totals = [launch(total, world_size=2, device=device, timeout=60) for _ in range(2)]
    return totals == [[3.0, 3.0]] * 2


def total() -> float:
    """On each rank, return the sum of all ranks' numbers, counted from 1."""
    number = torch.tensor([dist.get_rank() + 1.0], device=rank_device())
    dist.all_reduce(number)
    return number.item()


def raises_with(
    error: type[LaunchError], words: str, function: Callable, device: str, timeout: float = 60
) -> bool:
    """Return whether a launch of `function` raises `error` with `words` in its message."""
    try:
        launch(function, world_size=2, device=device, timeout=timeout)
    except error as caught:
        return words in str(caught)
    return False


def out_of_memory() -> None:
    """Ask on rank 1 for more memory than there is, in the middle of training."""
    if dist.get_rank() == 1:
        torch.empty(2**50, dtype=torch.uint8, device=rank_device())
    total()


def killed() -> None:
    """Kill rank 1 while rank 0 waits for it."""
    total()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total()


def absent() -> None:
    """Sleep on rank 1 while rank 0 waits for it."""
    if dist.get_rank() == 1:
        time.sleep(60)
    total()


def no_context() -> bool:
    """Return whether ranks on the CPU leave CUDA alone, training included."""
    return not any(launch(cuda_after_training, world_size=2, device="cpu", timeout=60))


def cuda_after_training() -> bool:
    """On each rank, return whether CUDA was touched by a step of stage 5."""
    problem = problems.make("synthetic", **VECTORS)
    batches = problem.batches(8, 2, 0, dist.get_rank(), dist.get_world_size())
    ladder.find("5").trainer({})(problem.model(0), batches, 0.1)
    return torch.cuda.is_initialized()


def steps(args: argparse.Namespace) -> Part:
    """Time a step of stage 6 beside torch's class, and compare their peak memory.

    Wrappers are made in both orders.
    """
    rows: list[Row] = []
    parameters = LARGE
    if args.small or args.device == "cpu":
        parameters = SMALL
    for world_size, samples in product(world_sizes(args.device), (FEW, ENOUGH)):
        setting = {"world_size": world_size, "parameters": parameters, "samples": samples}
        model: Model = ("bytes", {"parameters": parameters}, samples)
        for order in permutations(("torch", "ours")):
            measure = partial(launch, step_times, args.repeats, order, model, timeout=300)
            measured = measure(world_size=world_size, device=args.device)[0]
            rows.append({**setting, "made first": order[0], **measured})
    promises = []
    if args.device != "cpu":
        ratios: dict[int, list[float]] = {FEW: [], ENOUGH: []}
        for row in rows:
            ratios[row["samples"]].append(row["ours"] / row["torch"])
        promises = promises_of_ratios("step time, times torch's", ratios[ENOUGH], STEP_RATIO, EACH)
        promises.append(
            Promise("the same where the GPU waits for Python, slowest", max(ratios[FEW]), WAITING)
        )
        most = max(row["ours, GiB"] / row["torch, GiB"] for row in rows)
        promises.append(Promise("peak memory, times torch's, largest", most, MEMORY_RATIO))
    return Part(rows, promises)


def step_times(repeats: int, order: tuple[str, ...], model: Model) -> Row:
    """On each rank, return the median seconds of a step with each wrapper, and on a GPU its memory.

    The memory is that at the peak.
    """
    make, inputs, targets = model_and_batch(*model)
    inputs, targets = inputs.to(rank_device()), targets.to(rank_device())
    wrappers: dict[str, Callable] = {"torch": TorchDDP, "ours": DistributedDataParallel}

    def two_steps(wrap: Callable) -> Callable:
        parallel = wrap(make().to(rank_device()))
        train = partial(
            step, parallel, torch.optim.SGD(parallel.parameters(), lr=0.01), inputs, targets
        )
        train(), train()
        return train

    # CUDA's libraries take their own memory here, before a wrapper is measured.
    two_steps(lambda model: model)
    ways = {}
    memory = {}
    for name in order:
        before = allocated()
        train = two_steps(wrappers[name])
        if rank_device().type == "cuda":
            memory[f"{name}, GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        ways[name] = timed(finished, train)
    turns = take_turns(ways, repeats, warm_up=4)
    medians = {name: statistics.median_high(seconds) for name, seconds in turns.items()}
    return medians | memory


def allocated() -> int:
    """Return the bytes of this rank's tensors on its GPU, 0 on the CPU.

    Their peak is counted anew from here.
    """
    if rank_device().type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def compared(args: argparse.Namespace) -> Part:
    """Compare all stages on the device, as `ddp-course compare` does."""
    ranks = 2 if args.device == "cpu" else max(2, *world_sizes(args.device))
    rate = 0.01  # At this rate rounding errors do not grow from step to step.
    results = comparison.run(
        "synthetic",
        ranks,
        24,
        "1,2,3,4,5,6,7,8,9,torch",
        args.device,
        link=None,
        parameters=12 * 256**2,
        lr=rate,
        timeout=180,
    )
    columns = ("stage", "name", "step_ms", "communication_ms", "max_abs_diff_vs_single")
    rows = []
    for stage in results.stages:
        row: Row = {"world_size": ranks}
        for name in columns:
            row[name] = getattr(stage, name)
        rows.append(row)
    far = results.max_abs_diff
    return Part(rows, [Promise("distance to one device's weights in float32, largest", far, 1e-4)])


def own_tests(args: argparse.Namespace) -> Part:
    """Run the project's tests that are marked `cuda`, where the checkout and pytest are there."""
    root = Path(__file__).resolve().parents[1]
    files = [str(file) for file in root.glob("tests/**/*.py") if MARK in file.read_text("utf-8")]
    if importlib.util.find_spec("pytest") is None or not files:
        return Part([{"tests": "not run: they need pytest and the checkout"}])
    options = ["-q", "-m", "cuda", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    summary = (ended.stdout.strip() or ended.stderr.strip() or "nothing printed").splitlines()[-1]
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    rows = [{"tests": line} for line in [*failed, summary]]
    return Part(rows, [Promise("exit code of pytest", ended.returncode, at_most=0)])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the device to look at."""
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries it without a GPU"
    )
    parser.add_argument("--small", action="store_true", help="a small model, to try the command")


def on_device(part: Callable[[argparse.Namespace], Part]) -> Callable[[argparse.Namespace], Part]:
    """Refuse to measure without a GPU; name the GPU in the report.

    A part that fails does not cost the others.
    """

    def measure_on_device(args: argparse.Namespace) -> Part:
        if args.device == "cuda" and not usable_gpus():
            raise ValueError(
                "there is no GPU here that CUDA can use; --device cpu tries the command without one"
            )
        try:
            outcome = part(args)
        # A part may fail in any way on a kind of machine that is new to it.
        except Exception as error:
            outcome = Part(
                [{"ended by": f"{type(error).__name__}: {error}"}],
                [Promise("errors", 1, at_most=0)],
            )
        if args.device == "cpu":
            print(NOT_ON_THE_CPU.get(part.__name__, NOT_ON_THE_CPU["steps"]))
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        count = usable_gpus() if args.device == "cuda" else 0
        return Part(
            outcome.rows,
            outcome.promises,
            outcome.table,
            {**outcome.also, "device": device, "GPUs": count},
        )

    return measure_on_device


def lessons(args: argparse.Namespace) -> Part:
    """Run the lessons' cells "On your GPUs": all their stages in one comparison, and its figure."""
    results = on_your_gpus("2,3,4,5,6,7,8,9,torch")
    columns = ("stage", "name", "step_ms", "max_abs_diff_vs_single")
    rows = []
    for stage in results.stages:
        rows.append({name: getattr(stage, name) for name in columns})
    also = {"measured_on": results.measured_on, "message": results.message}
    if importlib.util.find_spec("matplotlib") is not None:
        from ddp_course.lab.showing.plots import compare_figure

        path = writable_folder(args.out) / "gpu_lessons.png"
        replace_file(path, compare_figure(results).png(dpi=120))
    promise = Promise("distance to one device's weights, largest", results.max_abs_diff, 1e-4)
    return Part(rows, [promise], also=also)


def scaled(args: argparse.Namespace) -> Part:
    """Measure weak and strong scaling of stage 6 over the GPUs; weak scaling is promised.

    It is promised of real GPUs only.
    """
    counts = [1, 2] if args.device == "cpu" else world_sizes("cuda")
    if len(counts) == 1:
        return Part([{"left out": SEVERAL}])
    rows = scaling(counts, args.device)
    weak = [row["efficiency"] for row in rows if row["scaling"] == "weak"][-1]
    promise = Promise("efficiency of weak scaling on all GPUs", weak, at_least=WEAK)
    return Part(rows, [promise] if args.device == "cuda" else [])


def summed(args: argparse.Namespace) -> Part:
    """Time all-reduces of the backend, our ring and our server, beside the closed forms."""
    count = max([2] if args.device == "cpu" else world_sizes("cuda"))
    if count == 1:
        return Part([{"left out": SEVERAL}])
    return Part(all_reduces(count, args.device, min(args.repeats, 5)))


def recorded(args: argparse.Namespace) -> Part:
    """Record a step of stage 6 by torch's profiler, with NCCL's all-reduces on their stream."""
    if args.device == "cpu" or usable_gpus() == 1:
        return Part([{"left out": SEVERAL}])
    rows = traced(max(world_sizes("cuda")), writable_folder(args.out) / "gpu_trace.json")
    return Part(rows, [Promise("all-reduces in the trace", rows[0]["all-reduces"], at_least=1)])


class Answers:
    """The table at the end of a report: `rows` with a question and its answer each."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, question: str, what: str, right: bool | None, because: str) -> None:
        """Add a row; `right` is None where something was not checked, `because` of a reason."""
        words = {True: "yes", False: "no", None: f"not checked here, because {because}"}[right]
        self.rows.append({"is it": question, "what": what, "answer": words})


def answers(report: Row) -> list[Row]:
    """Answer each question of the table at the end, a row for each, from the report's parts."""
    parts = report["parts"]
    table = Answers()
    exact = parts.get("exactness", {}).get("rows", [])
    with_nccl = [row for row in exact if "nccl" in row.get("backend", "")]
    rows_of = {
        "ranks on one device": [row for row in exact if row.get("backend") == "gloo"],
        "a GPU for each rank, NCCL": [row for row in with_nccl if row["world_size"] > 1],
    }
    for name, chosen in rows_of.items():
        right = None
        because = ONE_GPU if exact else NOT_ASKED
        if chosen or any("ended by" in row for row in exact):
            right = keeps_all(parts["exactness"])
        table.add("right", f"all stages end like one device: {name}", right, because)
    for part, what in {
        "compare": "the comparison, stages 1 to 9",
        "lessons": 'the lessons\' cells "On your GPUs"',
        "tests": "the tests that are marked cuda",
    }.items():
        table.add("right", what, keeps_all(parts.get(part)), NOT_ASKED)
    for row in parts.get("safety", {}).get("rows", []):
        if "check" in row:
            what = f"{row['check']} ({row['backend']})"
            table.add("safe", what, row["as it should be"], "nvidia-smi lists no processes")
            if row["backend"] == "gloo" and row["check"] in UNDER_NCCL:
                table.add("safe", f"{row['check']} (NCCL)", None, ONE_GPU)
    steps_part = parts.get("steps", {})
    timed_rows = steps_part.get("rows") if steps_part.get("GPUs") else None
    fast = keeps_all(steps_part) if timed_rows else None
    table.add(
        "fast", "stage 6 takes as long and as much memory as torch's class", fast, "no GPU is here"
    )
    weak = "on all GPUs a step keeps 70 % of its speed, if the batch grows with them"
    table.add("fast", weak, keeps_all(parts.get("scaling")), SEVERAL)
    traced = "NCCL's all-reduces are in the profiler's trace of a step"
    table.add("right", traced, keeps_all(parts.get("trace")), SEVERAL)
    return table.rows


def keeps_all(part: Row | None) -> bool | None:
    """Return whether all promises of a part are kept; None if nothing was promised."""
    if part is None or not part["promises"]:
        return None
    return all(promise["kept"] for promise in part["promises"])


def finish(report: Row, folder: Path) -> list[Path]:
    """Print the table at the end, and add it to the report."""
    report["answers"] = answers(report)
    print(table(report["answers"]))
    replace_file(folder / "gpu.json", (json.dumps(report, indent=1) + "\n").encode())
    of_lessons = folder / "gpu_lessons.png"
    written = [of_lessons] if of_lessons.exists() else []
    if importlib.util.find_spec("matplotlib") is not None:
        device = report["parts"].get("scaling", {}).get("device", "this machine")
        written += figures(report["parts"], device, folder)
    return written


BENCHMARK = Benchmark(
    "gpu",
    "what can only be seen on GPUs: right, safe, fast?",
    {
        "exactness": on_device(exactness),
        "safety": on_device(safety),
        "steps": on_device(steps),
        "compare": on_device(compared),
        "lessons": on_device(lessons),
        "scaling": on_device(scaled),
        "all_reduce": on_device(summed),
        "trace": on_device(recorded),
        "tests": on_device(own_tests),
    },
    repeats=20,
    file="gpu.json",
    add_options=add_options,
    finish=finish,
)
