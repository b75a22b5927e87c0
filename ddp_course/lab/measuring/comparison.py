"""The main job: every stage trains on the same batches, and each is measured against the others.

`run` trains and returns a `Comparison`; `results` says what each of its fields is.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from manyranks.devices import Device, full_speed, placement, rank_device
from manyranks.errors import NotFiniteError
from manyranks.launching.launch import launch
from manyranks.links import Link

from ... import ladder
from ...job import Job, make_job
from ...ladder import Stage
from ..waiting import say_while
from .emulated import device_and_link
from .ideals import ideals
from .recording import Recording
from .results import Comparison, RankReport, StageResult, summarise

DEFAULT_STAGES = "1,2,3,4,5,6,torch"


def run(
    problem: str = "digits",
    world_size: int = 4,
    steps: int | None = None,
    stages: str | Iterable[str] = DEFAULT_STAGES,
    device: str | Device = "auto",
    link: Link | str | None = "auto",
    device_speed: str = "auto",
    link_mode: str = "virtual",
    progress: bool = False,
    **options: Any,
) -> Comparison:
    """Train with every stage on the same global batches and return the results.

    Without GPUs the ranks compute on emulated devices, in virtual time: `device` may be a `Device`,
    `device_speed` its rate, such as "2GFLOP/s", or "none" for the processor as it is. `link` is a
    `Link`, a bandwidth with `link_mode`, or None; "auto" is a bandwidth that fits the device, and
    None on GPUs, which have links of their own. `options`: `global_batch` (samples), `lr`, `seed`,
    `dtype` (a name), `bucket_cap_mb` (of stages 5 and 6 and of torch's DDP, default 0.25: small
    enough that the default model fills several), `parameters` (of bytes and synthetic), `timeout`
    (seconds per launch). `progress` shows a bar for each stage, which counts its steps. Ranks of
    torchrun all call this, without emulation and without a bar, and train each stage. Raises
    ValueError for a setting that cannot work.
    """
    keys = stages.split(",") if isinstance(stages, str) else stages
    wanted = [ladder.find(str(key).strip()) for key in keys]
    job = make_job(problem, world_size, steps, progress=progress, **options)
    real_device = device if isinstance(device, str) else "cpu"
    backend, devices = placement(real_device, world_size)
    with say_while("preparing, some seconds", progress):
        used_device, used_link = device_and_link(job, device, device_speed, link, link_mode)
    return Comparison(
        problem=problem,
        world_size=world_size,
        steps=job.steps,
        dtype=job.dtype,
        global_batch=job.global_batch,
        parameters=job.parameter_count,
        gradient_bytes=job.gradient_bytes,
        torch=torch.__version__,
        device=devices[0].split(":")[0],
        backend=dist.get_backend() if dist.is_initialized() else backend,
        emulated_device=used_device.describe() if isinstance(used_device, Device) else None,
        link=used_link.describe() if used_link else None,
        stages=measure_stages(wanted, job, used_device, used_link),
    )


def measure_stages(
    wanted: list[Stage], job: Job, device: Device | str, link: Link | None
) -> list[StageResult]:
    """The results of all stages; stage 1 trains first, as the others are compared with it.

    Raises NotFiniteError where a loss is no longer a number.
    """
    stages = list(dict.fromkeys([ladder.find("1"), *wanted]))
    ideal_ms = ideals(stages, job, device, link) if isinstance(device, Device) else {}
    single_weights = None
    results = []
    for stage in stages:
        ranks = run_stage(stage, job, device, link, single_weights)
        if stage.key == "1":
            single_weights = ranks[0].weights
        result = summarise(stage, ranks)
        refuse_not_finite(result)
        results.append(result)
        result.device = str(device)
        result.ideal_ms = ideal_ms.get(stage.key)
        result.speed_up = results[0].step_ms / result.step_ms
        if stage.bytes_sent is not None:
            result.bytes_formula = round(stage.bytes_sent(job))
    return [result for stage, result in zip(stages, results, strict=True) if stage in wanted]


def refuse_not_finite(result: StageResult) -> None:
    """Raise NotFiniteError at the first step whose loss is no number."""
    for step, loss in enumerate(result.loss, 1):
        if not math.isfinite(loss):
            raise NotFiniteError(
                f"the loss of {result.name} is no longer a number from step {step} on: choose a"
                " smaller --lr"
            )


def run_stage(
    stage: Stage,
    job: Job,
    device: Device | str,
    link: Link | None,
    single_weights: torch.Tensor | None,
) -> list[RankReport]:
    """Train with one stage on all its ranks; return what each reports. `single_weights` are those
    that stage 1 ended with, None while it runs.
    """
    if isinstance(device, Device):
        names = [f"cpu:{number}" for number in range(job.world_size)]
        device = device.over(link)  # Copies between devices of one process take the link's time.
    else:
        _, names = placement(device, job.world_size)
    settings = {"bucket_cap_mb": job.bucket_cap_mb, "devices": names}
    if dist.is_initialized():
        return run_on_this_job(stage, job, settings, single_weights)
    world_size = job.world_size
    if stage.one_process:
        world_size = 1
        link = None
    return launch(
        train_and_measure,
        stage,
        job,
        settings,
        single_weights,
        world_size=world_size,
        device=device,
        link=link,
        timeout=job.timeout,
        progress=(stage.name, job.steps) if job.progress else False,
    )


def run_on_this_job(
    stage: Stage, job: Job, settings: dict, single_weights: torch.Tensor | None
) -> list[RankReport]:
    """What each rank that torchrun has started reports of one stage; every rank calls this."""
    dist.barrier()
    began = time.perf_counter()
    report = None
    if dist.get_rank() == 0 or not stage.one_process:
        report = train_and_measure(stage, job, settings, single_weights)
        report.record.zero = began  # Every machine has a clock of its own.
    reports: list[Any] = [None] * job.world_size
    dist.all_gather_object(reports, report)
    return [report for report in reports if report]


def train_and_measure(
    stage: Stage, job: Job, settings: dict, single_weights: torch.Tensor | None
) -> RankReport:
    """What each rank runs: train with `stage`, and report times, traffic, losses and the distance
    to `single_weights`.
    """
    job = replace(job, device=str(rank_device()))
    rank, shares = (dist.get_rank(), job.world_size) if stage.splits_batch else (0, 1)
    model = job.model()
    torch.set_num_threads(1)  # On the CPU a device is one core in every stage.
    # TF32's 10 bits of mantissa would make the stages differ.
    torch.backends.cudnn.allow_tf32 = False
    record = Recording()
    train = stage.trainer(settings)
    losses = train(model, record.stamped(job.batches(rank, shares)), job.lr)
    full_speed()  # The evaluation is not timed.
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    difference = 0.0
    if single_weights is not None:
        difference = (weights - single_weights).abs().max().item()
    return RankReport(
        record=record,
        loss=losses,
        difference=difference,
        evaluation=job.problem.evaluate(model) if dist.get_rank() == 0 else None,
        weights=weights if stage.key == "1" else None,
    )
