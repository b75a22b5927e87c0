"""Trains any stage from the command line, with checkpoints and exact resume.

It runs as one process, and under torchrun and Slurm:

    python -m ddp_course.train --problem bytes --stage 6 --steps 200 --checkpoint runs/first
    torchrun --nproc-per-node=4 --max-restarts=3 -m ddp_course.train --checkpoint runs/first
    srun --ntasks=8 python -m ddp_course.train --stage 6 --checkpoint runs/first

The stage's own `train()` is called once for each checkpoint, and begins each time as it would in a
restarted run. So a restarted run goes on from the newest checkpoint as if nothing had happened,
with the same batches, the same dropout masks and the same bits. A finished run ends at once.
"""

from manyranks.joining.parent import end_with_torchrun

if __name__ == "__main__":
    # This comes first, as importing torch takes seconds.
    end_with_torchrun()

import argparse
import os
import random
import statistics
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from manyranks import watch_finite
from manyranks.devices import placement, rank_device
from manyranks.errors import ManyranksError
from manyranks.joining.join import join

from . import checkpoint, ladder, problems
from .base.errors import CheckpointError, CourseError
from .base.objects import of_all_ranks
from .base.options import positive_number, whole_number
from .job import Job, make_job

# A checkpoint of this script has these keys.
STATE = {"step", "losses", "model", "random", "world_size", "settings"}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of `python -m ddp_course.train`."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_course.train",
        description="The script form of every stage, for one process, torchrun and Slurm, with"
        " checkpoints and exact resume",
    )
    add = parser.add_argument
    stages = "default 6; 4w: whole-gradient ring, 7o: ZeRO-1"
    add("--stage", default="6", choices=ladder.STAGES, help=stages)
    add("--checkpoint", metavar="DIR", help="save here, and go on from the newest that is there")
    add("--device", default="auto", help="auto, cpu, cuda, or one GPU such as cuda:0")
    waiting = "seconds to wait for a rank that does not answer (default 1800)"
    add("--timeout", type=positive_number, default=1800.0, metavar="S", help=waiting)
    add(
        "--seed",
        type=partial(whole_number, least=0),
        default=0,
        help="seed of weights, batches and dropout (default 0)",
    )
    counts = {
        "--steps": ("N", None, "training steps in all (default: the problem's)"),
        "--every": ("N", 10, "steps between checkpoints (default 10)"),
        "--keep": ("N", 2, "checkpoints to keep (default 2)"),
        "--global-batch": ("B", None, "samples per step, over all ranks together"),
        "--parameters": ("P", None, "size of the model of bytes and synthetic"),
        "--pipeline": ("S", None, "stage 8: ranks that form a pipeline (default: all)"),
        "--tensor": ("T", None, "stage 9: ranks that share each layer (default: all)"),
    }
    for option, (letter, default, words) in counts.items():
        add(option, type=whole_number, metavar=letter, default=default, help=words)
    add("--problem", default="digits", choices=problems.NAMES, help="default digits")
    dropped = "share of activations dropped in training (default 0)"
    add("--dropout", type=float, default=0.0, help=dropped)
    add("--dtype", default="float32", choices=("float32", "float64"), help="default float32")
    add("--lr", type=positive_number, help="learning rate (default: the problem's)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train to the last step, from the newest checkpoint if there is one; every rank calls this.

    Return {"losses": the mean loss of every global batch from the first step on, "model": the whole
    state dict, "evaluation": the problem's measures, "resumed": the step from which the run went
    on}. Raises CheckpointError if the checkpoint does not fit the options, ValueError for options
    that cannot work.
    """
    # All devices compute in the dtype that was asked for.
    torch.backends.cudnn.allow_tf32 = False
    if ladder.find(options.stage).one_process and dist.get_world_size() > 1:
        raise ValueError(
            f"stage {options.stage} is a single process, but {dist.get_world_size()} ranks were"
            " started"
        )
    # No other run may write into the folder until the last step.
    with ExitStack() as claims:
        saved = newest_checkpoint(options.checkpoint, claims) if options.checkpoint else None
        job = job_of(options, saved)
        if saved:
            check_settings(saved, job, options.checkpoint)
        state = saved or {"step": 0, "losses": [], "model": job.model().state_dict(), "random": []}
        while state["step"] < job.steps:
            state = train_to_next_checkpoint(options, job, state)
            say(f"step {state['step']}/{job.steps}  loss {state['losses'][-1]:.4f}")
            if options.checkpoint:
                checkpoint.save(options.checkpoint, state, options.keep)
    model = job.model()
    model.load_state_dict(state["model"])
    resumed = saved["step"] if saved else 0
    return {
        "losses": state["losses"],
        "model": {name: tensor.cpu() for name, tensor in state["model"].items()},
        "evaluation": job.problem.evaluate(model),
        "resumed": resumed,
    }


def newest_checkpoint(folder: str, claims: ExitStack) -> dict[str, Any] | None:
    """Return the checkpoint that rank 0 finds in the folder, on all ranks; None if there is none.

    No other run can write into the folder until `claims` is closed. An error of rank 0 is raised on
    all ranks.
    """
    saved = None
    failure = None
    if dist.get_rank() == 0:
        try:
            claims.enter_context(checkpoint.writing_to(folder))
            if checkpoint.checkpoints(folder):
                saved = checkpoint.load(folder)
                if not isinstance(saved, dict) or not STATE.issubset(saved):
                    raise CheckpointError(
                        f'the newest checkpoint in "{folder}" is not one of this script; choose'
                        " another folder"
                    )
        except CheckpointError as error:
            failure = error
    message: list[Any] = [saved, failure]
    dist.broadcast_object_list(message, src=0)
    saved, failure = message
    if failure:
        raise failure
    return saved


def job_of(options: argparse.Namespace, saved: Any) -> Job:
    """Return the job that the options ask for, or else the checkpoint, or else the problem."""
    global_batch = options.global_batch
    if saved and global_batch is None:
        global_batch = saved["settings"].get("global_batch")
    return make_job(
        options.problem,
        dist.get_world_size(),
        steps=options.steps,
        global_batch=global_batch,
        lr=options.lr,
        parameters=options.parameters,
        seed=options.seed,
        dtype=options.dtype,
        dropout=options.dropout,
        device=str(rank_device()),
    )


def settings_of(job: Job) -> dict[str, Any]:
    """Return the settings that may not change between runs, by the names of their options."""
    return {
        "problem": job.problem_name,
        "seed": job.seed,
        "global_batch": job.global_batch,
        "parameters": job.parameters,
        "dropout": job.dropout,
        "dtype": job.dtype,
        "lr": job.lr,
    }


def check_settings(saved: Any, job: Job, folder: str) -> None:
    """Raise CheckpointError if the checkpoint was made with other options.

    Stage, ranks and steps may change, but a checkpoint beyond `--steps` is refused, as steps cannot
    be undone.
    """
    differences = []
    for name, new in settings_of(job).items():
        old = saved["settings"].get(name)
        if old != new:
            differences.append(f"--{name.replace('_', '-')} {old} (now {new})")
    if differences:
        raise CheckpointError(
            f'the checkpoint in "{folder}" was made with {", ".join(differences)}. '
            "Use the same options, or another folder."
        )
    if saved["step"] > job.steps:
        raise CheckpointError(
            f'the run in "{folder}" is at step {saved["step"]}, beyond --steps {job.steps}. '
            f"Ask for {saved['step']} or more, or use another folder."
        )
    if saved["world_size"] != dist.get_world_size():
        say(
            f"the checkpoint was written by {saved['world_size']} ranks, this run has"
            f" {dist.get_world_size()}: it goes on with the same batches; dropout masks and the"
            " last bits of sums will differ"
        )


def train_to_next_checkpoint(
    options: argparse.Namespace, job: Job, state: dict[str, Any]
) -> dict[str, Any]:
    """Train from the checkpoint `state` to the next one, and return the next one."""
    stage = ladder.find(options.stage)
    world_size = dist.get_world_size()
    start = state["step"]
    # Checkpoints are made at multiples of `every`, wherever a run went on from, and at the end.
    end = min(job.steps, start - start % options.every + options.every)
    model = job.model()
    model.load_state_dict(state["model"])
    watch_finite(model)
    seed_this_rank(job.seed, state)
    gpus = None
    if rank_device().type == "cuda":
        _, gpus = placement(options.device, torch.cuda.device_count())
    train = stage.trainer({"devices": gpus, "stages": options.pipeline, "tensor": options.tensor})
    ranks_per_replica = 1
    # Ranks that have parts of one model need the same samples.
    if not stage.splits_batch:
        ranks_per_replica = options.pipeline or options.tensor or world_size
    batches = job.problem.batches(
        job.global_batch,
        end,
        job.seed,
        rank=dist.get_rank() // ranks_per_replica,
        world_size=world_size // ranks_per_replica,
        start=start,
    )
    losses = train(model, batches, job.lr)
    return {
        "step": end,
        "losses": state["losses"] + mean_over_ranks(losses),
        "model": model.state_dict(),
        "random": checkpoint.random_states(),
        "world_size": world_size,
        "settings": settings_of(job),
    }


def seed_this_rank(seed: int, state: dict[str, Any]) -> None:
    """Restore this rank's random generators from the checkpoint, or seed them if it has none."""
    # Up to 1,000 seeds and ranks, each step, seed and rank have a sum of their own: a rank that is
    # new in this run draws masks that no rank has drawn.
    own_seed = 1_000_000 * state["step"] + 1000 * seed + dist.get_rank()
    torch.manual_seed(own_seed)
    np.random.seed(own_seed % 2**32)
    random.seed(own_seed)
    checkpoint.set_random_state(state["random"])


def mean_over_ranks(losses: list[float]) -> list[float]:
    """Return the loss of each global batch: the mean of all ranks' losses of their shares."""
    by_step = zip(*of_all_ranks(losses), strict=True)
    return [statistics.fmean(losses_of_ranks) for losses_of_ranks in by_step]


def say(text: str) -> None:
    """Print a line, once for all ranks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script and end the process.

    The exit code is 0 for success, 1 for a failed run, 2 for options that cannot work.
    """
    try:
        options = parse(arguments)
        join(options.device, options.timeout)
        result = run(options)
        steps = len(result["losses"])
        if result["resumed"] == steps:
            say(f"the run in {options.checkpoint} is finished: {steps} steps")
        measures = result["evaluation"].items()
        say("  ".join(f"{name} {value:.4f}" for name, value in measures))
        dist.barrier()
        if rank_device().type == "cuda":
            # Otherwise NCCL would take the end of this process for a failure; gloo does not.
            dist.destroy_process_group()
        code = 0
    except (ValueError, CourseError, ManyranksError) as error:
        several = int(os.environ.get("WORLD_SIZE", 1)) > 1
        prefix = f"rank {os.environ['RANK']}: " if several else ""
        print(f"ddp_course.train: {prefix}{error}", file=sys.stderr)
        code = 2 if isinstance(error, ValueError) else 1
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Python would wait for the communication thread, which may wait for a rank that has ended.
    os._exit(code)


if __name__ == "__main__":
    main()
