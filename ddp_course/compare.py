"""The main job: every stage trains on the same batches, and each is measured against the others.

`run` returns the results as plain data, `save` writes them as JSON, CSV and a figure, `table` as text.
"""

import csv
import io
import json
import statistics
import time
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from tqdm.auto import tqdm

from . import (
    problems,
    stage1_single,
    stage2_dataparallel,
    stage3_paramserver,
    stage4_ring,
    stage5_bucketed,
    stage6_ddp,
)
from .measuring import timeline
from .running import checkpoint, wire
from .running.devices import placement, rank_device
from .running.files import replace_file, writable_folder
from .running.launch import launch

NAMES = {
    "1": "single device",
    "2": "DataParallel",
    "3": "parameter server",
    "4w": "whole-gradient ring",
    "4": "ring",
    "5": "bucketed DDP",
    "6": "complete DDP",
    "torch": "torch's DDP",
}
DEFAULT_STAGES = ("1", "2", "3", "4", "5", "torch")
ELSEWHERE = {"7o": "sharded optimizer", "7": "fully sharded", "8": "pipeline"}  # trained by the script form only
ONE_PROCESS = ("1", "2")
COUNTED = ("3", "4", "4w", "5", "7o", "7", "8")  # their bytes go over our own wire


def run(problem="digits", world_size=4, steps=None, stages=DEFAULT_STAGES, device="auto", dtype="float32", **options):
    """Train with every stage on the same global batches and return the results, ready for JSON.

    `options`: `global_batch` (samples), `lr`, `seed`, `bucket_cap_mb` (of stages 5 and 6 and of torch's DDP, default
    0.25: small enough that the default model fills several), `link` (a `Link` or None), `parameters` (of bytes and
    synthetic), `timeout` (seconds a stage), `progress` (show a bar).
    Keys of the result: world_size, device, dtype, problem, parameters, gradient_bytes, link, and stages: a list of
    stage, name, step_ms (median; the slowest rank counts), communication_ms (what the backward pass did not hide),
    bytes_sent_max, bytes_received_max, messages_max (a step's, the busiest rank's; null where torch or threads do
    the sending), loss (of the global batch, each step), max_abs_diff_vs_single, timeline, evaluation.
    Raises ValueError for a setting that cannot work.
    """
    progress, link = options.pop("progress", False), options.pop("link", None)
    job = _job(problem, world_size, steps, device, dtype, **options)
    stages = check_stages(stages)
    where = placement(device, world_size)
    results = {
        "world_size": world_size,
        "device": where.devices[0].split(":")[0],
        "backend": where.backend,
        "dtype": dtype,
        "problem": problem,
        **_size_of(job),
        "global_batch": job["global_batch"],
        "steps": job["steps"],
        "link": link.describe() if link else None,
        "torch": torch.__version__,
        "stages": [],
    }
    single = None
    with tqdm(total=len({"1", *stages}), unit="stage", disable=not progress) as bar:
        for stage in ["1", *(stage for stage in stages if stage != "1")]:
            bar.set_description(NAMES[stage])
            measured = _measure(stage, job, single, device, link)
            weights = measured.pop("weights")
            single = weights if stage == "1" else single
            results["stages"] += [measured] if stage in stages else []
            bar.update()
    return results


def read(folder):
    """The results of runs elsewhere, as `run` returns them: `folder` has what `ddp_course.train --results` wrote there.

    Stage 1 is trained here on the same batches, so that the curves and weights can be held against one device.
    Raises ValueError if nothing is there or a file is damaged, or if the runs are not of one and the same job.
    """
    from .strategies import NAMES as ORDER

    runs = [_read_run(file) for file in sorted(Path(folder).glob("stage-*.pt"))]
    if not runs:
        missing = "no results in" if Path(folder).is_dir() else "there is no folder"
        raise ValueError(f'{missing} "{folder}"; make some with: python -m ddp_course.train --stage 4 --results DIR')
    jobs = [run["job"] for run in runs]
    if any(job != jobs[0] for job in jobs):
        differing = sorted({key for job in jobs for key in job if job[key] != jobs[0][key]})
        raise ValueError(f'the runs in "{folder}" differ in {", ".join(differing)}; keep one job to a folder')
    names = ("problem", "world_size", "steps", "device", "dtype", "global_batch", "lr", "seed")
    job = _job(**{name: jobs[0][name] for name in names}, **jobs[0]["settings"])
    single = _measure("1", job, None, "cpu", None)
    reference = single.pop("weights")
    entries = {"1": single}
    for run in runs:
        difference = (run["weights"] - reference).abs().max().item()
        entries[run["entry"]["stage"]] = {**run["entry"], "max_abs_diff_vs_single": difference, "emulated": False}
    keys = ("world_size", "device", "backend", "dtype", "problem", "global_batch", "steps")
    header = {key: jobs[0][key] for key in keys}
    stages = sorted(entries.values(), key=lambda entry: ORDER.index(entry["stage"]))
    return {**header, **_size_of(job), "link": None, "torch": torch.__version__, "stages": stages}


def _read_run(file):
    """What `ddp_course.train --results` wrote to `file`: job, entry of the stage, weights."""
    try:
        run = checkpoint.unpacked(file.read_bytes())
        if not run.keys() >= {"job", "entry", "weights"}:
            raise ValueError("it holds no results")
    except (ValueError, OSError) as error:
        raise ValueError(f'cannot read "{file}": {error}. Run that stage again, or remove the file') from error
    return run


def check_stages(stages):
    """Return the stages (a list, or text such as "1,4,torch") as a list of names; ValueError for an unknown one."""
    names = [name.strip() for name in stages.split(",")] if isinstance(stages, str) else [str(name) for name in stages]
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise ValueError(f"unknown stage {', '.join(map(repr, unknown))}; choose among {', '.join(NAMES)}")
    return list(dict.fromkeys(names))


def _job(
    problem,
    world_size,
    steps,
    device,
    dtype,
    global_batch=None,
    lr=None,
    seed=0,
    parameters=None,
    bucket_cap_mb=0.25,
    timeout=300.0,
):
    """Everything a rank needs to know, checked before anything starts."""
    if world_size < 1:
        raise ValueError(f"world size is {world_size}; it must be 1 or more")
    if dtype not in ("float32", "float64"):
        raise ValueError(f'dtype is "{dtype}"; choose float32 or float64')
    if parameters is not None and problem == "digits":
        raise ValueError("the model of digits has one size; choose --problem bytes or synthetic with --parameters")
    settings = {} if parameters is None else {"parameters": parameters}
    made = problems.make(problem, dtype=getattr(torch, dtype), **settings)
    steps = made.steps if steps is None else steps
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}; it must be a positive number of MiB, such as 25")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be 1 or more")
    if global_batch is None:
        global_batch = max(world_size, made.global_batch // world_size * world_size)
    problems.share(global_batch, world_size)
    next(made.batches(global_batch, 1, seed=seed))
    return {
        "problem": problem,
        "settings": {**settings, "dtype": getattr(torch, dtype)},
        "world_size": world_size,
        "steps": steps,
        "global_batch": global_batch,
        "lr": made.learning_rate if lr is None else lr,
        "seed": seed,
        "bucket_cap_mb": bucket_cap_mb,
        "timeout": timeout,
    }


def _size_of(job):
    model = problems.make(job["problem"], **job["settings"]).model(job["seed"])
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameters: nothing to average, nothing to train")
    count = sum(parameter.numel() for parameter in trainable)
    return {"parameters": count, "gradient_bytes": count * trainable[0].element_size()}


def _measure(stage, job, reference, device, link):
    """Run one stage on all its ranks and sum up what they report."""
    alone = stage in ONE_PROCESS
    ranks = launch(
        train_and_measure,
        stage,
        job,
        reference,
        device,
        world_size=1 if alone else job["world_size"],
        device=device,
        timeout=job["timeout"],
        link=None if alone else link,
    )
    emulated = bool(link) and not alone and (stage in COUNTED or link.carries_torch)
    return {**summed_up(stage, ranks), "emulated": emulated, "weights": ranks[0]["weights"]}


def summed_up(stage, ranks):
    """The entry of a stage in the results, from what each of its ranks reports; the slowest and the busiest count.

    The timeline is that of a typical step: the one whose time is nearest to the median.
    """
    per_step = [max(step) for step in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    median = statistics.median(per_step)
    typical = min(range(len(per_step)), key=lambda step: abs(per_step[step] - median))
    exposed = list(zip(*(rank["exposed_s"] for rank in ranks), strict=True))
    traffic = [rank["traffic"] for rank in ranks]
    busiest = {key: max(one[key] for one in traffic) if stage in COUNTED else None for key in traffic[0]}
    return {
        "stage": stage,
        "name": (NAMES | ELSEWHERE)[stage],
        "step_ms": 1000 * median,
        "communication_ms": None if stage == "2" else 1000 * statistics.median(max(step) for step in exposed),
        **busiest,
        "loss": [statistics.fmean(step) for step in zip(*(rank["loss"] for rank in ranks), strict=True)],
        "max_abs_diff_vs_single": max(rank["difference"] for rank in ranks),
        "evaluation": ranks[0]["evaluation"],
        "timeline": [rank["timelines"][typical] for rank in ranks],
    }


def train_and_measure(stage, job, reference, device):
    """What each rank runs: train with `stage`, and report times, traffic, losses and the distance to `reference`."""
    world_size = job["world_size"]
    mine = (0, 1) if stage in ONE_PROCESS else (dist.get_rank(), world_size)
    problem = problems.make(job["problem"], device=rank_device(), **job["settings"])
    model = problem.model(job["seed"])
    batches = problem.batches(job["global_batch"], job["steps"], job["seed"], *mine)
    torch.set_num_threads(1)  # a device of the CPU is one core, for all stages alike
    with recording() as record:
        losses = trainer(stage, job, device)(model, record.stamped(batches), job["lr"])
    weights = flat_weights(model)
    return {
        **record.report(),
        "loss": losses,
        "difference": 0.0 if reference is None else (weights - reference).abs().max().item(),
        "evaluation": problem.evaluate(model) if mine[0] == 0 else None,
        "weights": weights if stage == "1" else None,
    }


def flat_weights(model):
    """All parameters as one vector on the CPU."""
    return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])


@contextmanager
def recording():
    """Record what this rank does in each step: `with recording() as record: train(model, record.stamped(batches))`."""
    record = Recording()
    with timeline.recording() as record.spans, wire.observing(record.events.append):
        yield record


class Recording:
    """Spans and events of one rank's training, and when each step began."""

    def __init__(self):
        self.spans, self.events, self.began = [], [], []

    def stamped(self, batches):
        """Yield the batches, noting when each was asked for, and when the last step was over."""
        self.began.append(time.perf_counter())
        for batch in batches:
            yield batch
            self.began.append(time.perf_counter())

    def report(self):
        """Seconds, exposed communication and timeline of each step, and the traffic of the last one."""
        steps = list(pairwise(self.began))
        by_step = [[span for span in self.spans if start <= span.start < end] for start, end in steps]
        return {
            "step_s": [end - start for start, end in steps],
            "exposed_s": [timeline.exposed(inside) for inside in by_step],
            "traffic": traffic_of([event for event in self.events if steps[-1][0] <= event.start < steps[-1][1]]),
            "timelines": [
                [[span.name, span.start - begin, span.end - begin, span.lane] for span in inside]
                for (begin, _), inside in zip(steps, by_step, strict=True)
            ],
        }


def trainer(stage, job, device="cpu"):
    """Return the `train(model, batches, lr)` of a stage; `device` is what was asked for, as in `launch`."""
    if stage == "2":
        return partial(stage2_dataparallel.train, devices=placement(device, job["world_size"]).devices)
    if stage == "4w":
        whole = partial(stage4_ring.average_on_ring, all_reduce=stage4_ring.whole_gradient_ring)
        return partial(stage4_ring.train, average=whole)
    trainers = {
        "1": stage1_single.train,
        "3": stage3_paramserver.train,
        "4": stage4_ring.train,
        "5": partial(stage5_bucketed.train, bucket_cap_mb=job["bucket_cap_mb"]),
        "6": partial(stage6_ddp.train, bucket_cap_mb=job["bucket_cap_mb"]),
        "torch": partial(train_torch, bucket_cap_mb=job["bucket_cap_mb"]),
    }
    return trainers[stage]


def train_torch(model, batches, lr, bucket_cap_mb):
    """The loop of stage 5 around torch's own DistributedDataParallel, its all-reduces shown to the observers."""
    devices = [rank_device()] if rank_device().type == "cuda" else None
    parallel = DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=bucket_cap_mb)
    parallel.register_comm_hook(None, observed_all_reduce)
    optimizer = SGD(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def observed_all_reduce(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's default averaging of one bucket, as a hook that also tells when it began and ended."""
    start = time.perf_counter()
    flat = bucket.buffer().mul_(1 / dist.get_world_size())

    def done(future):
        wire.tell("span", "all_reduce", start)
        return future.value()[0]

    return dist.all_reduce(flat, async_op=True).get_future().then(done)


def traffic_of(events):
    """Sum up one rank's events of one step: bytes out, bytes in, messages out and in together."""
    traffic = wire.Traffic()
    for event in events:
        traffic.add(event)
    return {
        "bytes_sent_max": traffic.bytes_sent,
        "bytes_received_max": traffic.bytes_received,
        "messages_max": traffic.messages_sent + traffic.messages_received,
    }


def table(results):
    """The results as text: a line a stage."""
    header = ["stage", "name", "step ms", "comm. ms", "sent by busiest", "messages", "last loss", "max diff to 1"]
    rows = [header]
    for stage in results["stages"]:
        sent, waiting = stage["bytes_sent_max"], stage["communication_ms"]
        rows.append(
            [
                stage["stage"],
                stage["name"],
                f"{stage['step_ms']:.1f}",
                "–" if waiting is None else f"{waiting:.1f}",
                "–" if sent is None else f"{sent:,}",
                "–" if stage["messages_max"] is None else str(stage["messages_max"]),
                f"{stage['loss'][-1]:.4f}",
                f"{stage['max_abs_diff_vs_single']:.1e}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def save(results, folder):
    """Write compare.json, .csv and .png into `folder`, each replaced in one go; return their paths."""
    from .showing.plots import compare_figure

    folder = writable_folder(folder)
    picture = io.BytesIO()
    compare_figure(results).savefig(picture, format="png", dpi=120)
    contents = {
        "compare.json": json.dumps(results, indent=1).encode(),
        "compare.csv": _csv(results).encode(),
        "compare.png": picture.getvalue(),
    }
    return [replace_file(folder / name, content) for name, content in contents.items()]


def _csv(results):
    columns = ["stage", "name", "step_ms", "communication_ms", "bytes_sent_max", "bytes_received_max", "messages_max"]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*columns, "last_loss", "max_abs_diff_vs_single"])
    for stage in results["stages"]:
        writer.writerow([*(stage[key] for key in columns), stage["loss"][-1], stage["max_abs_diff_vs_single"]])
    return text.getvalue()
