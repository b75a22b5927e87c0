"""The main job: every stage trains on the same batches, and each is measured against the others.

`run` trains here and returns the results as plain data; `read` makes the same of what `ddp_course.train --results`
wrote on a cluster. The keys of both: world_size, device, emulated_device, dtype, problem, parameters, gradient_bytes,
link, and stages, a list of

    stage, name, device
    step_ms                 median; the slowest rank counts
    ideal_ms                what it should be (`ideals`); null on real devices
    speed_up                over one device
    communication_ms        what the backward pass did not hide
    bytes_sent_max, bytes_received_max, messages_max
                            a step's, the busiest rank's; null where torch or threads do the sending
    bytes_formula           what the busiest rank should send
    loss                    of the global batch, each step
    max_abs_diff_vs_single, timeline, evaluation
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import ladder, problems
from ..errors import NotFiniteError
from ..ladder import Stage
from ..running import checkpoint
from ..running.devices import Device, full_speed, placement, rank_device
from ..running.launching.launch import launch
from ..running.links import Link, calibrate
from ..stage4_ring import ring_all_reduce
from . import emulated
from .ideals import ideals
from .recording import flat_weights, recording, summed_up

TIMED_STEPS = 10  # on emulated devices: enough for a median
LEARNED = ("loss", "difference", "evaluation", "weights")  # the same bits with and without the emulation
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

    Without GPUs the ranks compute on emulated devices, slow enough for this machine to time them exactly: `device`
    may be a `Device`, `device_speed` its rate, such as "2GFLOP/s", or "none" for the processor as it is. `link`: a
    `Link`, a bandwidth with `latency` and `link_mode`, or None; "auto" is one whose figure shows what the course is
    about, and none on GPUs, which have their own. On emulated devices the first steps are timed, and what is learned
    comes from a run of all steps without devices and links. `options`: `global_batch` (samples), `lr`, `seed`,
    `bucket_cap_mb` (of stages 5 and 6 and of torch's DDP, default 0.25: small enough that the default model fills
    several), `parameters` (of bytes and synthetic), `timeout` (seconds a launch). `progress` shows a bar. Raises
    ValueError for a setting that cannot work.
    """
    stages, job = check_stages(stages), _job(problem, world_size, steps, dtype, **options)
    sizes = _size_of(job)
    if isinstance(device, str):
        placement(device, world_size)  # refuses what there is not
    device, link = emulated.chosen(job, sizes, device, device_speed, link, latency, link_mode)
    results = {**_place(job, device, link), **sizes}
    return {**results, "stages": _measure_all(stages, job, device, link, sizes["gradient_bytes"], progress)}


def _place(job, device, link):
    """Note in the job where its ranks run; return the head of the results."""
    on_emulated = isinstance(device, Device)
    where = placement("cpu" if on_emulated else device, job["world_size"])
    job["devices"] = [f"cpu:{number}" for number in range(job["world_size"])] if on_emulated else where.devices
    job["all_reduce"] = None if link is None or link.carries_torch else ring_all_reduce
    return {
        **{name: job[name] for name in ("world_size", "problem", "global_batch", "steps")},
        "device": where.devices[0].split(":")[0],
        "backend": where.backend,
        "dtype": str(job["settings"]["dtype"]).removeprefix("torch."),
        "emulated_device": device.describe() if on_emulated else None,
        "link": described(link, job["world_size"]),
        "torch": torch.__version__,
    }


def _measure_all(stages, job, device, link, nbytes, progress):
    """The entries of all stages, each beside what it should be; one device trains first, for the others' sake."""
    formulas = _formulas(stages, job, nbytes)
    wanted = [ladder.find(key) for key in dict.fromkeys(["1", *stages])]
    ideal_ms = ideals(wanted if isinstance(device, Device) else [], job, device, link, nbytes)
    single, alone_ms, entries = None, None, []
    for stage in shown(wanted) if progress else wanted:
        measured = _measure(stage, job, single, device, link)
        weights = measured.pop("weights")
        if stage.key == "1":
            single, alone_ms = weights, measured["step_ms"]
        told = {"bytes_formula": formulas[stage.key], "ideal_ms": ideal_ms.get(stage.key), "device": str(device)}
        entries.append({**measured, **told, "speed_up": alone_ms / measured["step_ms"]})
    return [entry for entry in entries if entry["stage"] in stages]


def shown(stages: list[Stage]) -> Iterator[Stage]:
    """The `stages`, with a bar that names them."""
    from tqdm.auto import tqdm  # here: who shows no bar can do without

    for stage in (bar := tqdm(stages, unit="stage")):
        bar.set_description(stage.name)
        yield stage


def described(link: Link | None, world_size: int) -> dict | None:
    """The link, ready for JSON, and what it really carries."""
    if link is None:
        return None
    link.rehearse(world_size)  # it may have to take another mode
    return {**link.describe(), "calibration": calibrate(link)}


def read(folder: str | Path) -> dict:
    """The results of runs elsewhere, as `run` returns them: `folder` has what `ddp_course.train --results` wrote there.

    Stage 1 is trained here on the same batches, so that the curves and weights can be held against one device.
    Raises ValueError if nothing is there or a file is damaged, or if the runs are not of one and the same job.
    """
    runs = [_read_run(file) for file in sorted(Path(folder).glob("stage-*.pt"))]
    if not runs:
        missing = "no results in" if Path(folder).is_dir() else "there is no folder"
        raise ValueError(f'{missing} "{folder}"; make some with: python -m ddp_course.train --stage 4 --results DIR')
    jobs = [run["job"] for run in runs]
    if any(job != jobs[0] for job in jobs):
        differing = sorted({key for job in jobs for key in job if job[key] != jobs[0][key]})
        raise ValueError(f'the runs in "{folder}" differ in {", ".join(differing)}; keep one job to a folder')
    names = ("problem", "world_size", "steps", "dtype", "global_batch", "lr", "seed")
    job = _job(**{name: jobs[0][name] for name in names}, **jobs[0]["settings"])
    single = _measure(ladder.find("1"), job, None, "cpu", None)
    reference = single.pop("weights")
    entries = {"1": single}
    for run in runs:
        difference = (run["weights"] - reference).abs().max().item()
        entries[run["entry"]["stage"]] = {**run["entry"], "max_abs_diff_vs_single": difference, "emulated": False}
    keys = ("world_size", "device", "backend", "dtype", "problem", "global_batch", "steps")
    header = {key: jobs[0][key] for key in keys} | _size_of(job)
    formulas = _formulas(entries, job, header["gradient_bytes"])
    stages = [{**entries[key], "bytes_formula": formulas[key]} for key in ladder.STAGES if key in entries]
    return {**header, "link": None, "torch": torch.__version__, "stages": stages}


def _read_run(file):
    """What `ddp_course.train --results` wrote to `file`: job, entry of the stage, weights."""
    try:
        run = checkpoint.unpacked(file.read_bytes())
        if not run.keys() >= {"job", "entry", "weights"}:
            raise ValueError("it holds no results")
    except (ValueError, OSError) as error:
        raise ValueError(f'cannot read "{file}": {error}. Run that stage again, or remove the file') from error
    return run


def check_stages(stages: str | Iterable[str]) -> list[str]:
    """Return the stages (a list, or text such as "1,4,torch") as a list of keys; ValueError for an unknown one."""
    keys = [key.strip() for key in stages.split(",")] if isinstance(stages, str) else [str(key) for key in stages]
    unknown = [key for key in keys if key not in ladder.STAGES]
    if unknown or not keys:
        raise ValueError(f"unknown stage {', '.join(map(repr, unknown))}; choose among {', '.join(ladder.STAGES)}")
    return list(dict.fromkeys(keys))


def _job(
    problem,
    world_size,
    steps,
    dtype,
    global_batch=None,
    lr=None,
    seed=0,
    parameters=None,
    bucket_cap_mb=0.25,
    timeout=300.0,
):
    """Everything a rank needs to know, checked before anything starts."""
    _refuse(problem, world_size, steps, dtype, lr, parameters, bucket_cap_mb)
    settings = {} if parameters is None else {"parameters": parameters}
    made = problems.make(problem, dtype=getattr(torch, dtype), **settings)
    if global_batch is None:
        global_batch = max(world_size, made.global_batch // world_size * world_size)
    problems.share(global_batch, world_size)
    next(made.batches(global_batch, 1, seed=seed))
    return {
        "problem": problem,
        "settings": {**settings, "dtype": getattr(torch, dtype)},
        "world_size": world_size,
        "steps": made.steps if steps is None else steps,
        "global_batch": global_batch,
        "lr": made.learning_rate if lr is None else lr,
        "seed": seed,
        "bucket_cap_mb": bucket_cap_mb,
        "timeout": timeout,
    }


def _refuse(problem, world_size, steps, dtype, lr, parameters, bucket_cap_mb):
    """Raise ValueError for a setting that cannot work."""
    if world_size < 1:
        raise ValueError(f"world size is {world_size}; it must be 1 or more")
    if dtype not in ("float32", "float64"):
        raise ValueError(f'dtype is "{dtype}"; choose float32 or float64')
    if parameters is not None and problem == "digits":
        raise ValueError("the model of digits has one size; choose --problem bytes or synthetic with --parameters")
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"lr is {lr}; it must be a positive number, such as 0.1")
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}; it must be a positive number of MiB, such as 25")
    if steps is not None and steps < 1:
        raise ValueError(f"steps is {steps}; it must be 1 or more")


def _size_of(job):
    model = problems.make(job["problem"], **job["settings"]).model(job["seed"])
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameters: nothing to average, nothing to train")
    count = sum(parameter.numel() for parameter in trainable)
    return {"parameters": count, "gradient_bytes": count * trainable[0].element_size()}


def _formulas(stages, job, nbytes):
    """What the busiest rank of each stage should send in a step, in bytes; None where there is no formula."""
    cuts = _activation_bytes(job) if "8" in stages else []
    formulas = {key: ladder.find(key).bytes_sent for key in ["1", *stages]}
    return {key: formula and round(formula(nbytes, job["world_size"], cuts)) for key, formula in formulas.items()}


def _activation_bytes(job):
    """Bytes of one batch's activations at each cut of a pipeline over all ranks."""
    from ..stage8_pipeline import layers_of, split

    problem = problems.make(job["problem"], **job["settings"])
    flowing, _ = next(problem.batches(job["global_batch"], 1, seed=job["seed"]))
    sizes = []
    with torch.no_grad():
        for part in split(layers_of(problem.model(job["seed"])), job["world_size"])[:-1]:
            flowing = part(flowing)
            sizes.append(flowing.numel() * flowing.element_size())
    return sizes


def _measure(stage, job, reference, device, link):
    """Run one stage on all its ranks and sum up what they report."""
    if isinstance(device, Device) and job["steps"] > TIMED_STEPS:
        timed = _ranks(stage, {**job, "steps": TIMED_STEPS}, None, device, link)
        learned = _ranks(stage, job, reference, "cpu", None)
        ranks = [{**one, **{name: whole[name] for name in LEARNED}} for one, whole in zip(timed, learned, strict=True)]
    else:
        ranks = _ranks(stage, job, reference, device, link)
    diverged = next(
        (
            step
            for step, losses in enumerate(zip(*(rank["loss"] for rank in ranks), strict=True))
            if not all(map(math.isfinite, losses))
        ),
        None,
    )
    if diverged is not None:
        raise NotFiniteError(
            f"the loss of {stage.name} is no longer a number from step {diverged + 1} on: choose a smaller --lr"
        )
    linked = bool(link) and not stage.one_process
    ours = linked and not stage.counted and not link.carries_torch  # else it would seem to have no link at all
    return {**summed_up(stage, ranks), "emulated": linked, "on_our_wire": ours, "weights": ranks[0]["weights"]}


def _ranks(stage, job, reference, device, link):
    """What each rank of one stage reports."""
    return launch(
        train_and_measure,
        stage,
        job,
        reference,
        world_size=1 if stage.one_process else job["world_size"],
        device=device.over(link) if isinstance(device, Device) else device,
        timeout=job["timeout"],
        link=None if stage.one_process else link,
    )


def train_and_measure(stage: Stage, job: dict, reference: torch.Tensor | None) -> dict:
    """What each rank runs: train with `stage`, and report times, traffic, losses and the distance to `reference`."""
    mine = (dist.get_rank(), job["world_size"]) if stage.splits_batch else (0, 1)
    problem = problems.make(job["problem"], device=rank_device(), **job["settings"])
    model = problem.model(job["seed"])
    batches = problem.batches(job["global_batch"], job["steps"], job["seed"], *mine)
    torch.set_num_threads(1)  # a device of the CPU is one core, for all stages alike
    torch.backends.cudnn.allow_tf32 = False  # 10 bits of mantissa would be a difference between the stages
    with recording() as record:
        losses = stage.trainer(job)(model, record.stamped(batches), job["lr"])
    full_speed()  # nobody waits for the evaluation
    weights = flat_weights(model)
    return {
        **record.report(),
        "loss": losses,
        "difference": 0.0 if reference is None else (weights - reference).abs().max().item(),
        "evaluation": problem.evaluate(model) if dist.get_rank() == 0 else None,
        "weights": weights if stage.key == "1" else None,
    }
