"""Trains every stage on the same batches, and measures each against the others.

`run` trains and returns a `Comparison`; the module `results` says what each of its fields is.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from manyranks.devices import Device, full_speed, placement, rank_device
from manyranks.errors import NotFiniteError
from manyranks.launching.launch import launch
from manyranks.links import Link
from manyranks.torch_inside import without_modes

from ... import ladder
from ...base.objects import of_all_ranks
from ...job import Job, make_job
from ...ladder import Stage
from ...your_model import YourModel
from ..learners_copy import keep
from ..waiting import say_while
from .emulated import device_and_link
from .ideals import ideals
from .recording import Recording
from .results import Comparison, RankReport, StageResult, summarise

DEFAULT_STAGES = "1,2,3,4,5,6,torch"
EARLY = 8  # In so many first steps weights are compared, to say from which step on they differ.


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
    yours: dict[str, Callable] | None = None,
    model: str | Callable | None = None,
    **options: Any,
) -> Comparison:
    """Train with every stage on the same global batches and return the results.

    `yours` are training functions of your own by name, such as {"my ring": my_train}: every rank
    calls `my_train(model, batches, lr)` with its share of each batch, and gets each step's loss.
    `model` stands for the `problem`: a function that makes a model of your own, with data, loss and
    optimizer (docs/YOUR_MODEL.md), or its place, such as "mine.py:make".

    Without GPUs the ranks compute on emulated devices, in virtual time: `device` may be a `Device`,
    `device_speed` its rate, such as "2GFLOP/s", or "none" for the processor as it is. `link` is a
    `Link`, a bandwidth with `link_mode`, or None; "auto" is a bandwidth that fits the device, and
    None on GPUs, which have their own. `options`: `global_batch` (samples), `lr`, `seed`, `dtype`
    (a name), `bucket_cap_mb` (of stages 5, 6 and torch's DDP, default 0.25), `parameters` (of bytes
    and synthetic), `timeout` (seconds per launch). `progress` shows a bar of each stage's steps.
    Ranks of torchrun all call this, and see no bar. Raises ValueError for what cannot work.
    """
    wanted = wanted_stages(stages, yours or {})
    what = problem if model is None else YourModel(model)
    job = make_job(what, world_size, steps, progress=progress, **options)
    backend, devices = placement(device if isinstance(device, str) else "cpu", world_size)
    with say_while("preparing, some seconds", progress):
        used_device, used_link = device_and_link(job, device, device_speed, link, link_mode)
    return Comparison(
        problem=str(what),
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


def wanted_stages(keys: str | Iterable[str], yours: dict[str, Callable]) -> list[Stage]:
    """The stages with these keys, and a learner's own. Raises ValueError for what is none."""
    if isinstance(keys, str):
        keys = keys.split(",")
    stages = [ladder.find(str(key).strip()) for key in keys]
    return stages + [stage_of_yours(name, train) for name, train in yours.items()]


def keep_own(results: list[StageResult], setting: str) -> None:
    """Keep in the learner's copy what trainings of their own did in this setting."""
    for result in results:
        fast = f"{result.speed_up:.2f} times as fast as one device"
        keep("runs", result.name, f"{setting}: {fast}, weights differ by {result.difference}")


def run_on_sockets_too(**options: Any) -> Comparison:
    """`run` in virtual time, with each stage's step on virtual hosts and real sockets beside it.

    Raises EmulationError where a machine allows no virtual hosts.
    """
    on_sockets = run(**options, link_mode="hosts")
    results = run(**options)
    for stage, real in zip(results.stages, on_sockets.stages, strict=True):
        stage.on_sockets = real.step_ms / stage.step_ms
    return results


def measure_stages(
    wanted: list[Stage], job: Job, device: Device | str, link: Link | None
) -> list[StageResult]:
    """Return the results of all stages; stage 1 trains first, as the others are compared with it.

    Raises NotFiniteError if a loss is no longer a number.
    """
    own = [stage for stage in wanted if stage.key == "yours"]
    # A function that somebody is just writing trains early, so that its errors come soon.
    stages = list(dict.fromkeys([ladder.find("1"), *own, *wanted]))
    ideal_ms = ideals(stages, job, device, link) if isinstance(device, Device) else {}
    single_weights = None
    results = {}
    for stage in stages:
        ranks = run_stage(stage, job, device, link, single_weights, with_yours=bool(own))
        if stage.key == "1":
            single_weights = ranks[0].weights
        result = summarise(stage, ranks)
        refuse_not_finite(result)
        results[stage] = result
        result.device = str(device)
        result.ideal_ms = ideal_ms.get(stage.key)
        result.speed_up = results[stages[0]].step_ms / result.step_ms
        if stage.bytes_sent is not None:
            result.bytes_formula = round(stage.bytes_sent(job))
    keep_own([results[stage] for stage in own], f"{job.world_size} ranks, {job.problem_name}")
    return [results[stage] for stage in dict.fromkeys(wanted)]


def stage_of_yours(name: str, train: Callable) -> Stage:
    """Return a learner's own training function as a stage; raises ValueError for no function."""
    if not callable(train):
        raise ValueError(
            f'yours["{name}"] is {train!r:.60}; it must be a function train(model, batches, lr)'
        )
    return Stage("yours", name, "your own", "", colour="", time="", train=train, counted=True)


def refuse_not_finite(result: StageResult) -> None:
    """Raise NotFiniteError at the first step whose loss is no number."""
    for step, loss in enumerate(result.loss, 1):
        if not math.isfinite(loss):
            # If it is a learner's own, one device has trained with this lr.
            advice = (
                f"its weights differ from step {result.differs_from_step} on"
                if result.stage == "yours"
                else "choose a smaller --lr"
            )
            raise NotFiniteError(
                f"the loss of {result.name} is no longer a number from step {step} on: {advice}"
            )


def run_stage(
    stage: Stage,
    job: Job,
    device: Device | str,
    link: Link | None,
    single_weights: list[torch.Tensor] | None,
    with_yours: bool,
) -> list[RankReport]:
    """Train with one stage on all its ranks; return what each rank reports.

    `single_weights` are those with which stage 1 ended, and None while it runs.
    """
    if isinstance(device, Device):
        names = [f"cpu:{number}" for number in range(job.world_size)]
        # Copies between devices of one process take the link's time.
        device = device.over(link)
    else:
        _, names = placement(device, job.world_size)
    # Only a function of somebody's own may go wrong; the single device's weights fill memory.
    early = stage.key == "1" and with_yours
    settings = {"bucket_cap_mb": job.bucket_cap_mb, "devices": names, "early": early}
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
    stage: Stage, job: Job, settings: dict, single_weights: list[torch.Tensor] | None
) -> list[RankReport]:
    """Return what each rank of torchrun reports of one stage; every rank calls this."""
    dist.barrier()
    began = time.perf_counter()
    report = None
    if dist.get_rank() == 0 or not stage.one_process:
        report = train_and_measure(stage, job, settings, single_weights)
        # Every machine has a clock of its own.
        report.record.zero = began
    return [report for report in of_all_ranks(report) if report]


def train_and_measure(
    stage: Stage, job: Job, settings: dict, single_weights: list[torch.Tensor] | None
) -> RankReport:
    """Train with `stage` on this rank, and report times, traffic, losses and distances of weights.

    The distances are to `single_weights`, those of one device after the early steps and at the end.
    """
    job = replace(job, device=str(rank_device()))
    rank, shares = (dist.get_rank(), job.world_size) if stage.splits_batch else (0, 1)
    model = job.model()
    torch.set_num_threads(1)  # On the CPU a device is one core in every stage.
    # TF32's 10 bits of mantissa would make the stages differ.
    torch.backends.cudnn.allow_tf32 = False
    record = Recording()
    problem = job.problem
    train = stage.trainer(
        {**settings, "loss": problem.training_loss, "optimizer": problem.optimizer}
    )
    history: list[torch.Tensor] = []
    batches = record.stamped(job.batches(rank, shares))
    if stage.key == "yours" or settings["early"]:
        batches = noting_weights(batches, model, history)
    losses = train(model, batches, job.lr)
    # The evaluation is not timed.
    full_speed()
    check_losses(stage, losses, job.steps)
    history.append(weights_of(model))
    differences = [0.0]
    if single_weights is not None:
        pairs = zip(history, single_weights[-len(history) :], strict=True)
        differences = [(mine - single).abs().max().item() for mine, single in pairs]
    return RankReport(
        record=record,
        loss=losses,
        differences=differences,
        evaluation=problem.evaluate(model) if dist.get_rank() == 0 else None,
        weights=history if stage.key == "1" else None,
    )


def noting_weights(batches: Iterable, model: torch.nn.Module, history: list) -> Iterator:
    """Yield the batches, and note the model's weights after each of the early steps."""
    for number, batch in enumerate(batches):
        yield batch
        if number < EARLY:
            # An emulated device takes no time for this.
            with without_modes():
                history.append(weights_of(model))


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights of a model in one tensor on the CPU."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def check_losses(stage: Stage, losses: Any, steps: int) -> None:
    """Raise ValueError unless a training function has returned a number for each step."""
    if not isinstance(losses, (list, tuple)) or len(losses) != steps:
        raise ValueError(
            f"{stage.name} returned {losses!r:.60}; train(model, batches, lr) must go through all"
            f" batches and return a list with the loss of each, {steps} numbers here"
        )
