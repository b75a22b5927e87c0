"""The main job: every stage trains on the same batches, and each is measured against the others.

`run` trains and returns the results as plain data, with the keys world_size, device,
emulated_device, dtype, problem, parameters, gradient_bytes, link, and stages, a list of

    stage, name, device
    step_ms                 median; the slowest rank counts
    ideal_ms                what it should be (`ideals`); null on real devices
    speed_up                over one device
    communication_ms        what the backward pass did not hide
    bytes_sent_max, bytes_received_max, messages_max
                            per step, of the busiest rank; null where torch or threads do the
                            sending
    bytes_formula           what the busiest rank should send
    loss                    of the global batch, each step
    max_abs_diff_vs_single, timeline, evaluation
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from .. import ladder
from ..errors import NotFiniteError
from ..ladder import Stage
from ..running.devices import Device, full_speed, placement, rank_device
from ..running.launching.launch import launch
from ..running.links import Link
from . import emulated
from .ideals import ideals
from .job import Job, checked
from .recording import Recording, summarise

DEFAULT_STAGES = ("1", "2", "3", "4", "5", "6", "torch")


def run(
    problem: str = "digits",
    world_size: int = 4,
    steps: int | None = None,
    stages: str | Iterable[str] = DEFAULT_STAGES,
    device: str | Device = "auto",
    dtype: str = "float32",
    link: Link | str | None = "auto",
    device_speed: str = "auto",
    latency: str = "0ms",
    link_mode: str = "auto",
    progress: bool = False,
    **options: Any,
) -> dict:
    """Train with every stage on the same global batches and return the results, ready for JSON.

    Without GPUs the ranks compute on emulated devices, in virtual time: `device` may be a `Device`,
    `device_speed` its rate, such as "2GFLOP/s", or "none" for the processor as it is. `link` is a
    `Link`, a bandwidth with `latency` and `link_mode`, or None; "auto" is a bandwidth that fits the
    device, and None on GPUs, which have links of their own. `options`: `global_batch` (samples),
    `lr`, `seed`, `bucket_cap_mb` (of stages 5 and 6 and of torch's DDP, default 0.25: small enough
    that the default model fills several), `parameters` (of bytes and synthetic), `timeout` (seconds
    per launch). `progress` shows a bar for each stage, which counts its steps. Ranks of torchrun
    all call this, without emulation and without a bar, and train each stage. Raises ValueError for
    a setting that cannot work.
    """
    keys = stages.split(",") if isinstance(stages, str) else stages
    chosen = [ladder.find(str(key).strip()) for key in keys]
    job = checked(problem, world_size, steps, dtype=dtype, progress=progress, **options)
    if isinstance(device, str):
        placement(device, world_size)  # This call refuses a device that this machine lacks.
    device, link = emulated.chosen(job, device, device_speed, link, latency, link_mode)
    return {**header(job, device, link), "stages": measure_all(chosen, job, device, link)}


def header(job: Job, device: Device | str, link: Link | None) -> dict:
    """The entries of the results about the job and about the machine."""
    backend, devices = placement("cpu" if isinstance(device, Device) else device, job.world_size)
    return {
        "problem": job.problem_name,
        "world_size": job.world_size,
        "steps": job.steps,
        "dtype": job.dtype,
        "global_batch": job.global_batch,
        "parameters": job.parameter_count,
        "gradient_bytes": job.gradient_bytes,
        "torch": torch.__version__,
        "device": devices[0].split(":")[0],
        "backend": dist.get_backend() if dist.is_initialized() else backend,
        "emulated_device": device.describe() if isinstance(device, Device) else None,
        "link": link and link.describe(),
    }


def measure_all(
    chosen: list[Stage], job: Job, device: Device | str, link: Link | None
) -> list[dict]:
    """The entries of all stages, each with its prediction; stage 1 trains first, as the others are
    compared with it.
    """
    stages = list(dict.fromkeys([ladder.find("1"), *chosen]))
    ideal_ms = ideals(stages, job, device, link) if isinstance(device, Device) else {}
    single, alone_ms, entries = None, None, []
    for stage in stages:
        entry = measured(stage, job, device, link, single)
        weights = entry.pop("weights")
        if stage.key == "1":
            single, alone_ms = weights, entry["step_ms"]
        formula = None if stage.bytes_sent is None else round(stage.bytes_sent(job))
        entry |= {"bytes_formula": formula, "ideal_ms": ideal_ms.get(stage.key)}
        entries.append({**entry, "device": str(device), "speed_up": alone_ms / entry["step_ms"]})
    return [entry for stage, entry in zip(stages, entries, strict=True) if stage in chosen]


def measured(
    stage: Stage, job: Job, device: Device | str, link: Link | None, reference: torch.Tensor | None
) -> dict:
    """Run one stage on all its ranks; return its entry in the results, and stage 1's weights."""
    ranks = reports(stage, job, device, link, reference)
    entry = summarise(stage, ranks)
    for step, loss in enumerate(entry["loss"], 1):
        if not math.isfinite(loss):
            since = f"the loss of {stage.name} is no longer a number from step {step} on"
            raise NotFiniteError(f"{since}: choose a smaller --lr")
    return {**entry, "weights": ranks[0]["weights"]}


def reports(
    stage: Stage, job: Job, device: Device | str, link: Link | None, reference: torch.Tensor | None
) -> list[dict]:
    """What each rank of one stage reports."""
    names = [f"cpu:{number}" for number in range(job.world_size)]
    settings = {
        "bucket_cap_mb": job.bucket_cap_mb,
        "devices": names if isinstance(device, Device) else placement(device, job.world_size)[1],
    }
    if dist.is_initialized():
        return reports_of_this_job(stage, job, settings, reference)
    where: dict[str, Any] = {"world_size": job.world_size, "link": link}
    if stage.one_process:
        where = {"world_size": 1, "link": None}
    where["device"] = device.over(link) if isinstance(device, Device) else device
    where["progress"] = job.progress and (stage.name, job.steps)
    return launch(train_and_measure, stage, job, settings, reference, timeout=job.timeout, **where)


def reports_of_this_job(
    stage: Stage, job: Job, settings: dict, reference: torch.Tensor | None
) -> list[dict]:
    """What each rank that torchrun has started reports of one stage; every rank calls this."""
    dist.barrier()
    begin, report = time.perf_counter(), None  # Every machine has a clock of its own.
    if dist.get_rank() == 0 or not stage.one_process:
        report = train_and_measure(stage, job, settings, reference)
        record = report["record"]
        record.began = [start - begin for start in record.began]
        record.spans = [
            [replace(s, start=s.start - begin, end=s.end - begin) for s in step]
            for step in record.spans
        ]
    ranks: list[Any] = [None] * job.world_size
    dist.all_gather_object(ranks, report)
    return [report for report in ranks if report]


def train_and_measure(
    stage: Stage, job: Job, settings: dict, reference: torch.Tensor | None
) -> dict:
    """What each rank runs: train with `stage`, and report times, traffic, losses and the distance
    to `reference`.
    """
    job = replace(job, device=str(rank_device()))
    share = (dist.get_rank(), job.world_size) if stage.splits_batch else (0, 1)
    model = job.model()
    torch.set_num_threads(1)  # On the CPU a device is one core in every stage.
    torch.backends.cudnn.allow_tf32 = (
        False  # TF32's 10 bits of mantissa would make the stages differ.
    )
    record = Recording()
    losses = stage.trainer(settings)(model, record.stamped(job.batches(*share)), job.lr)
    full_speed()  # The evaluation is not timed.
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    return {
        "record": record,
        "loss": losses,
        "difference": 0.0 if reference is None else (weights - reference).abs().max().item(),
        "evaluation": job.problem.evaluate(model) if dist.get_rank() == 0 else None,
        "weights": weights if stage.key == "1" else None,
    }
