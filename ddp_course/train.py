"""The script form of every stage, for one process, torchrun and Slurm, with checkpoints and exact resume:

    python -m ddp_course.train --problem bytes --stage 6 --steps 200 --checkpoint runs/first
    torchrun --nproc-per-node=4 --max-restarts=3 -m ddp_course.train --stage 6 --checkpoint runs/first
    srun --ntasks=8 python -m ddp_course.train --stage 6 --checkpoint runs/first

Started again, it goes on from the newest checkpoint as if nothing had happened: same batches, same dropout masks,
same bits. (To within rounding only, with more than two ranks: `--stage torch`, which lays its buckets out anew, and
`4w`, whose ranks differ in the last bits, while a checkpoint has one model.) A finished run ends at once.
"""

from .running.parent import end_with_torchrun

if __name__ == "__main__":
    end_with_torchrun()  # This comes first: importing torch takes seconds.

import argparse
import math
import os
import random
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from . import ladder, problems
from .errors import CheckpointError, CourseError
from .measuring import finite
from .running import checkpoint
from .running.devices import rank_device
from .running.join import join

OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
}
SCHEDULES: dict[str, Any] = {
    "constant": lambda optimizer, steps: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
    "cosine": torch.optim.lr_scheduler.CosineAnnealingLR,
}
MUST_MATCH = ("problem", "seed", "global_batch", "parameters", "dropout", "dtype", "lr", "optimizer", "schedule")
WRITTEN = ("settings", "world_size", "step", "losses", "model", "optimizer", "scheduler", "random")


def parser() -> argparse.ArgumentParser:
    """The options of `python -m ddp_course.train`."""
    options = argparse.ArgumentParser(prog="python -m ddp_course.train", description=__doc__.split(":")[0])
    add = options.add_argument
    add("--problem", default="digits", choices=problems.NAMES, help="default digits")
    add("--stage", default="6", choices=ladder.STAGES, help="default 6; 4w: whole-gradient ring, 7o: ZeRO-1")
    add("--steps", type=int, metavar="N", help="training steps in all (default: the problem's)")
    add("--seed", type=int, default=0, help="seed of weights, batches and dropout (default 0)")
    add("--checkpoint", metavar="DIR", help="save here, and go on from the newest checkpoint that is there")
    add("--every", type=int, default=10, metavar="N", help="steps between checkpoints (default 10)")
    add("--keep", type=int, default=2, metavar="N", help="checkpoints to keep (default 2)")
    add("--global-batch", type=int, metavar="B", help="samples per step, over all ranks together")
    add("--parameters", type=int, metavar="P", help="size of the model of bytes and synthetic")
    add("--dropout", type=float, default=0.0, help="share of activations dropped in training (default 0)")
    add("--dtype", default="float32", choices=("float32", "float64"), help="default float32")
    add("--optimizer", default="sgd", choices=OPTIMIZERS, help="default sgd, as in the lessons")
    add("--lr", type=float, help="learning rate (default: the problem's)")
    add("--schedule", default="constant", choices=SCHEDULES, help="of the learning rate")
    add("--pipeline", type=int, metavar="S", help="stage 8: ranks that form a pipeline (default: all)")
    add("--tensor", type=int, metavar="T", help="stage 9: ranks that share each layer (default: all)")
    add("--device", default="auto", help="auto, cpu, cuda, or one GPU such as cuda:0")
    return options


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and complete the options; ValueError for values that cannot work."""
    options = parser().parse_args(arguments)
    if options.problem == "digits" and options.parameters is not None:
        raise ValueError("the model of digits has one size; choose --problem bytes or synthetic with --parameters")
    if options.problem == "synthetic" and options.dropout:
        raise ValueError("synthetic has no dropout; choose --problem digits or bytes")
    if not 0 <= options.dropout < 1:
        raise ValueError(f"dropout is {options.dropout}; it must be at least 0 and below 1")
    problem = make_problem(options)
    options.steps = problem.steps if options.steps is None else options.steps
    options.lr = problem.learning_rate if options.lr is None else options.lr
    if not 0 < options.lr < math.inf:
        raise ValueError(f"lr is {options.lr}; a learning rate is a positive number, such as {problem.learning_rate}")
    for name in ("steps", "every", "keep"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; it must be 1 or more")
    return options


def make_problem(options: argparse.Namespace, device: Any = "cpu") -> Any:
    """The problem that the options ask for."""
    settings = {"parameters": options.parameters, "dropout": options.dropout or None}
    settings = {key: value for key, value in settings.items() if value is not None}
    return problems.make(options.problem, dtype=getattr(torch, options.dtype), device=device, **settings)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train to the last step, from the newest checkpoint if there is one; every rank calls this.

    Returns {"losses": mean loss of every global batch from the first step on, "model": the whole state dict,
    "evaluation": …, "resumed": the step it went on from}. Raises CheckpointError if the checkpoint does not fit the
    options, ValueError for options that cannot work.
    """
    torch.backends.cudnn.allow_tf32 = False  # All devices compute in the dtype that was asked for.
    with ExitStack() as folders:
        if options.checkpoint:  # No other run writes there, from the first step to the last.
            from_rank_0(folders.enter_context, checkpoint.writing_to(options.checkpoint))
        saved = newest_checkpoint(options)
        problem = make_problem(options, rank_device())
        options.global_batch = global_batch(options, problem, saved)
        strategy, scheduler = prepare(options, problem, saved)
        step, losses = (saved["step"], list(saved["losses"])) if saved else (0, [])
        batches = problem.batches(options.global_batch, options.steps, options.seed, *strategy.share(), step)
        losses = train_steps(options, strategy, scheduler, batches, step, losses)
    model = strategy.whole()
    return {
        "losses": losses,
        "model": {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()},
        "evaluation": problem.evaluate(model),
        "resumed": step,
    }


def from_rank_0(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)` returns on rank 0, on all ranks; its error is raised on all of them too."""
    message: list[Any] = [None, None]  # It holds a result and an error.
    if dist.get_rank() == 0:
        try:
            message[0] = function(*arguments)
        except CheckpointError as error:
            message[1] = error
    dist.broadcast_object_list(message, src=0)
    result, complaint = message
    if complaint:
        raise complaint
    return result


def train_steps(
    options: argparse.Namespace, strategy: Any, scheduler: Any, batches: Iterable[Any], step: int, losses: list[float]
) -> list[float]:
    """Train on `batches`, from step number `step` on; save every now and then; return all losses so far."""
    recent = []
    for inputs, targets in batches:
        strategy.optimizer.zero_grad()
        recent.append(strategy.backward(inputs, targets))
        strategy.optimizer.step()
        scheduler.step()
        step += 1
        if step % options.every == 0 or step == options.steps:
            losses, recent = losses + mean_over_ranks(recent), []
            say(f"step {step}/{options.steps}  loss {losses[-1]:.4f}")
            if options.checkpoint:
                save(options, strategy, scheduler, step, losses)
    return losses


def prepare(options: argparse.Namespace, problem: Any, saved: Any) -> tuple[Any, Any]:
    """Return the strategy and the learning rate schedule, in the state that the checkpoint `saved` describes."""
    model = problem.model(options.seed)
    if saved:
        check_settings(saved, options)
        model.load_state_dict(saved["model"])
    finite.watch(model)
    optimizer = partial(OPTIMIZERS[options.optimizer], lr=options.lr)
    stage = ladder.find(options.stage)
    if stage.one_process and dist.get_world_size() > 1:
        raise ValueError(f"stage {stage.key} is a single process, but {dist.get_world_size()} ranks were started")
    seed_this_rank(options.seed, saved)
    strategy = stage.wrapped(model, optimizer, stages=options.pipeline, tensor=options.tensor)
    scheduler = SCHEDULES[options.schedule](strategy.optimizer, options.steps)
    if saved:
        strategy.load(saved)
        scheduler.load_state_dict(saved["scheduler"])
    return strategy, scheduler


def newest_checkpoint(options: argparse.Namespace) -> dict[str, Any] | None:
    """What rank 0 finds in the folder, the same on all ranks; None if there is nothing yet, or no folder is named."""
    saved = from_rank_0(loaded, options.checkpoint) if options.checkpoint else None
    if saved and saved["world_size"] != dist.get_world_size():
        say(
            f"the checkpoint was written by {saved['world_size']} ranks, this run has {dist.get_world_size()}: "
            "it goes on with the same batches; dropout masks and the last bits of sums will differ"
        )
    return saved


def loaded(folder: str) -> dict[str, Any] | None:
    """The newest checkpoint in the folder, if any; CheckpointError if it was not written by this program."""
    if not checkpoint.checkpoints(folder):
        return None
    saved = checkpoint.load(folder)
    missing = [name for name in WRITTEN if not isinstance(saved, dict) or name not in saved]
    if missing:
        raise CheckpointError(
            f'the checkpoint in "{folder}" is not one of ddp_course.train: it has no "{missing[0]}". '
            "Choose another folder with --checkpoint."
        )
    return saved


def global_batch(options: argparse.Namespace, problem: Any, saved: Any) -> int:
    """Samples per step: the option's, else the checkpoint's, else the problem's own, rounded to a multiple of K."""
    world_size = dist.get_world_size()
    if options.global_batch is None and saved:
        return saved["settings"]["global_batch"]
    if options.global_batch is None:
        return max(world_size, problem.global_batch // world_size * world_size)
    return options.global_batch


def check_settings(saved: Any, options: argparse.Namespace) -> None:
    """Raise CheckpointError if the checkpoint was made with other options; stage and ranks may change.

    Steps may be added, but not with a schedule that ends with the steps; and no step can be taken back.
    """
    settings = saved["settings"]
    fixed = MUST_MATCH if options.schedule == "constant" else (*MUST_MATCH, "steps")
    values = {name: (settings.get(name), getattr(options, name)) for name in fixed}
    differences = [f"--{n.replace('_', '-')} {old} (now {new})" for n, (old, new) in values.items() if old != new]
    if differences:
        raise CheckpointError(
            f'the checkpoint in "{options.checkpoint}" was made with {", ".join(differences)}. '
            "Use the same options, or another folder."
        )
    if saved["step"] > options.steps:
        raise CheckpointError(
            f'the run in "{options.checkpoint}" is at step {saved["step"]}, beyond --steps {options.steps}. '
            f"Ask for {saved['step']} or more, or use another folder."
        )


def seed_this_rank(seed: int, saved: Any) -> None:
    """Put the random generators where the checkpoint had them, or at a beginning of this rank's own."""
    steps = saved["step"] if saved else 0  # A new rank must not draw what the first steps have drawn.
    mine = 1_000_000 * steps + 1000 * seed + dist.get_rank()  # Dropout masks must differ between ranks.
    torch.manual_seed(mine)
    np.random.seed(mine % 2**32)
    random.seed(mine)
    if saved:
        checkpoint.set_random_state(saved["random"])


def save(options: argparse.Namespace, strategy: Any, scheduler: Any, step: int, losses: list[float]) -> None:
    """Write a checkpoint; all ranks take part, rank 0 writes."""
    state = {
        **strategy.state(),
        "scheduler": scheduler.state_dict(),
        "step": step,
        "random": checkpoint.random_states(),
        "world_size": dist.get_world_size(),
        "losses": losses,
        "settings": {name: getattr(options, name) for name in (*MUST_MATCH, "steps")},
    }
    checkpoint.save(options.checkpoint, state, options.keep)


def mean_over_ranks(losses: list[Any]) -> list[float]:
    """The losses of the global batches from each rank's own; ranks that know none give None."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, losses)
    return [statistics.fmean(loss for loss in step if loss is not None) for step in zip(*ranks, strict=True)]


def say(text: str) -> None:
    """Print a line, once for all ranks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script and end the process: 0 for success, 1 for a failed run, 2 for options that cannot work."""
    try:
        options = parse(arguments)
        join(options.device)
        result = run(options)
        if result["resumed"] >= options.steps:
            say(f"the run in {options.checkpoint} is finished: {options.steps} steps")
        say("  ".join(f"{name} {value:.4f}" for name, value in result["evaluation"].items()))
        dist.barrier()
        code = 0
    except (ValueError, CourseError) as error:
        rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        print(f"ddp_course.train: {rank}{error}", file=sys.stderr)
        code = 2 if isinstance(error, ValueError) else 1
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python would wait for the communication thread, and that for a rank that has gone


if __name__ == "__main__":
    main()
