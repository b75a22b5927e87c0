"""What `make gpu` measures on several GPUs: how training scales, all-reduces, a trace of a step.

Each function returns rows for the report; `figures` draws them, where matplotlib is there. On a
processor the same runs with two ranks and small models, so that the command can be tried.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from ddp_course import problems, stage4_ring, wire
from ddp_course.base.files import replace_file
from ddp_course.lab.measuring import theory, traces
from ddp_course.lab.measuring.on_your_gpus import (
    LONG_ENOUGH_S,
    Size,
    find_size,
    profile_step,
    sizes,
)
from ddp_course.lab.measuring.timeline import hidden_share
from ddp_course.stage3_paramserver import average_on_server
from ddp_course.stage6_ddp import DistributedDataParallel
from manyranks.devices import rank_device
from manyranks.launching.launch import launch

from .harness import Row, medians, slowest, timed

WARM_UP = 3  # So many steps come first and are not timed.
STEPS = 5
MESSAGES = [2**10, 2**15, 2**20, 2**25]  # All-reduces have so many bytes.
SMALL = 2**12  # Two messages of so many bytes measure alpha and beta.
LARGE = 2**24
BACKEND = "backend's all-reduce"
RING = "our ring"
SERVER = "our server"


def finished(function: Callable) -> None:
    """Call `function`, and wait until the device has done all of it."""
    function()
    if rank_device().type == "cuda":
        torch.cuda.synchronize()


def precision() -> str:
    """Return the dtype in which this rank's device computes fastest.

    It is "bfloat16" on a GPU that has it.
    """
    has_bfloat16 = rank_device().type == "cuda" and torch.cuda.is_bf16_supported()
    return "bfloat16" if has_bfloat16 else "float32"


def scaling(counts: list[int], device: str) -> list[Row]:
    """Return a row for each number of devices, for weak and for strong scaling.

    It has the samples, the seconds of a step of stage 6, and the efficiency.
    """
    [(size, dtype)] = launch(size_for_scaling, max(counts), world_size=1, device=device)
    rows: list[Row] = []
    for way in ("weak", "strong"):
        for count in counts:
            samples = size.global_batch
            if way == "weak":
                samples *= count
            seconds, *_ = launch(
                step_seconds,
                size.parameters,
                samples,
                world_size=count,
                device=device,
                timeout=180,
            )
            row: Row = {"scaling": way, "devices": count, "parameters": size.parameters}
            rows.append({**row, "dtype": dtype, "samples": samples, "step_s": seconds})
    alone = {row["scaling"]: row["step_s"] for row in rows if row["devices"] == 1}
    for row in rows:
        row["efficiency"] = alone[row["scaling"]] / row["step_s"]
        if row["scaling"] == "strong":
            row["efficiency"] /= row["devices"]
    return rows


def size_for_scaling(most: int) -> tuple[Size, str]:
    """On one rank, return the first size that takes this device long enough, and its dtype."""
    for size in sizes(most):
        if rank_device().type == "cpu":
            break
        if step_seconds(size.parameters, size.global_batch) >= LONG_ENOUGH_S:
            break
    return size, precision()


def step_seconds(parameters: int, samples: int) -> float:
    """On each rank, return the median seconds of a step of stage 6; the slowest rank counts."""
    torch.set_num_threads(1)
    problem = problems.make("bytes", parameters=parameters, device=rank_device())
    parallel: Any = DistributedDataParallel(problem.model())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    in_precision: Any = nullcontext()
    if precision() == "bfloat16":
        in_precision = torch.autocast("cuda", torch.bfloat16)

    def step(inputs, targets):
        optimizer.zero_grad()
        with in_precision:
            loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()

    seconds = []
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    for batch in problem.batches(samples, WARM_UP + STEPS, 0, rank, world_size):
        dist.barrier()
        began = time.perf_counter()
        finished(partial(step, *batch))
        seconds.append(slowest(time.perf_counter() - began))
    return statistics.median(seconds[WARM_UP:])


def all_reduces(count: int, device: str, repeats: int) -> list[Row]:
    """Return a row for each size of a message: seconds of all-reduces, and what closed forms say.

    The all-reduces are the backend's, our ring and our server. Alpha and beta are measured here.
    """
    [(rows, costs), *_] = launch(
        measure_all_reduces, repeats, world_size=count, device=device, timeout=180
    )
    for row in rows:
        row[f"{RING}, derived"] = theory.ring(row["bytes"], count, costs)
        row[f"{SERVER}, derived"] = theory.parameter_server(row["bytes"], count, costs)
        row |= {"devices": count, "alpha_s": costs.alpha, "beta_s_per_byte": costs.beta}
    return rows


def measure_all_reduces(repeats: int) -> tuple[list[Row], theory.Costs]:
    """On each rank, return the seconds of each way, by size, and what a message costs."""
    rows: list[Row] = []
    for nbytes in MESSAGES:
        tensor = torch.ones(nbytes // 4, device=rank_device())
        ways = {
            BACKEND: partial(dist.all_reduce, tensor),
            RING: partial(stage4_ring.ring_all_reduce, tensor),
            SERVER: partial(average_on_server, [tensor]),
        }
        calls = {name: timed(finished, way) for name, way in ways.items()}
        rows.append({"bytes": nbytes, **medians(calls, repeats)})
    small_s = message_seconds(SMALL, repeats)
    large_s = message_seconds(LARGE, repeats)
    beta = max(0.0, large_s - small_s) / (LARGE - SMALL)
    return rows, theory.Costs(max(0.0, small_s - beta * SMALL), beta)


def message_seconds(nbytes: int, repeats: int) -> float:
    """On each rank, return half of what a message from rank 0 to rank 1 and back takes at best."""
    tensor = torch.ones(nbytes // 4, device=rank_device())

    def there_and_back():
        if dist.get_rank() == 0:
            wire.send(tensor, 1)
            wire.recv(tensor, 1)
        elif dist.get_rank() == 1:
            wire.recv(tensor, 0)
            wire.send(tensor, 0)

    wire.warm_up(tensor)
    call = timed(finished, there_and_back)
    call()
    return min(slowest(call()) for _ in range(repeats)) / 2


def traced(count: int, file: Path) -> list[Row]:
    """Record a step of stage 6 on rank 0 into `file`; return what its GPU did, as one row."""
    [(size, _)] = launch(find_size, count, world_size=1)  # The launch has one rank.
    launch(profile_step, size, str(file.resolve()), world_size=count, timeout=180)
    [step] = traces.read(file)
    row = {"devices": count, "step_s": step.seconds, "computing_s": step.seconds_in("compute")}
    row |= {"sending_s": step.seconds_in("network"), "all-reduces": len(step.reduced)}
    return [{**row, "share hidden": hidden_share(step.gpu)}]


def points(rows: list[Row], x: str, y: str) -> tuple[list, list]:
    """Return the columns `x` and `y` of the rows."""
    return [row[x] for row in rows], [row[y] for row in rows]


def figures(parts: Row, device: str, folder: Path) -> list[Path]:
    """Draw the parts of a report that are there: scaling, all-reduces, and the trace."""
    pictures = {}
    rows = [row for row in parts.get("scaling", {}).get("rows", []) if "scaling" in row]
    if rows:
        pictures["gpu_scaling.png"] = scaling_figure(rows, device)
    rows = [row for row in parts.get("all_reduce", {}).get("rows", []) if BACKEND in row]
    if rows:
        pictures["gpu_all_reduce.png"] = all_reduce_figure(rows, device)
    if (folder / "gpu_trace.json").exists():
        from ddp_course.lab.showing.trace_plot import trace

        pictures["gpu_trace.png"] = trace(folder / "gpu_trace.json")
    for name, picture in pictures.items():
        replace_file(folder / name, picture.png(dpi=120))
    return [folder / name for name in pictures]


def scaling_figure(rows: list[Row], device: str) -> Any:
    """Draw the efficiency of weak and strong scaling over the number of devices."""
    from ddp_course.lab.showing.plots import curves

    lines = {}
    for way in ("weak", "strong"):
        chosen = [row for row in rows if row["scaling"] == way]
        lines[way] = points(chosen, "devices", "efficiency")
    xs, efficiencies = lines["weak"]
    title = (
        f"On {xs[-1]} devices a step has {efficiencies[-1]:.0%} of one device's speed if"
        f" the batch grows with them, {lines['strong'][1][-1]:.0%} if it does not"
    )
    kind = f"measured on {device}, {rows[0]['dtype']}"
    ideal = {"ideal": (xs, [1.0] * len(xs))}
    return curves(lines, "devices", "efficiency", title, ideal, ticks=xs, kind=kind)


def all_reduce_figure(rows: list[Row], device: str) -> Any:
    """Draw the seconds of each all-reduce over the size of the message, beside closed forms."""
    from ddp_course.lab.showing.plots import STAGE_COLOURS, curves

    colours = {RING: STAGE_COLOURS["4"], SERVER: STAGE_COLOURS["3"]}
    lines: dict[str, Any] = {BACKEND: points(rows, "bytes", BACKEND)}
    derived: dict[str, Any] = {}
    for name, colour in colours.items():
        formula = f"{name}, derived"
        lines[name] = (*points(rows, "bytes", name), colour)
        derived[formula] = (*points(rows, "bytes", formula), colour)
    ratio = rows[-1][RING] / rows[-1][BACKEND]
    title = f"For the longest message our ring takes {ratio:.1f} times the backend's time"
    kind = f"measured on {device}"
    return curves(lines, "message (bytes)", "seconds", title, derived, log=("x", "y"), kind=kind)
