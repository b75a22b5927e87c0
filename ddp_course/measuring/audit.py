"""The six usual mistakes of a training script, found by watching it run on a few ranks.

    audit(source)      -> a line for each mistake; [] for a script without one

`source` is the text of a script for torchrun, like `ddp_course.script`. While it runs, the audit
notes what its DataLoaders yield, what `torch.save` is given, and the weights of the optimizer that
steps.
"""

import linecache
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import data

from ..running.launching.launch import launch
from ..running.torch_inside import tree_leaves

FOLDER = "FOLDER"  # In the arguments this word stands for a temporary folder.


@dataclass
class Epoch:
    """One pass of a rank over a DataLoader: its samples, whether set_epoch can shuffle them, and
    whether an optimizer made a step meanwhile.
    """

    samples: list[int]
    shuffles: bool
    trained: bool = False


class Report(NamedTuple):
    """What one rank did: the epochs that it trained on, the names of the tensors in each file that
    it saved, its weights at the end.
    """

    epochs: list[Epoch]
    saves: list[list[str]]
    weights: torch.Tensor | None


def audit(source: str, arguments: Sequence[str] = (FOLDER,)) -> list[str]:
    """Run the script on two ranks and say what is wrong with it, mistake by mistake, and what was
    not seen.
    """
    with tempfile.TemporaryDirectory() as folder:
        places = {FOLDER: folder}
        arguments = [places.get(argument, argument) for argument in arguments]
        ranks: list[Report] = launch(run_watched, source, arguments, world_size=2, device="cpu")
    writers = [number for number, rank in enumerate(ranks) if rank.saves]
    weights = [rank.weights for rank in ranks if rank.weights is not None]
    firsts = [samples_of_first(rank.epochs) for rank in ranks]
    first, *others = map(set, firsts)
    # A sampler's padding repeats fewer than K samples.
    messages = {
        "ranks train on the same samples: no DistributedSampler": any(
            len(first & other) >= len(ranks) for other in others
        ),
        "a rank trains on samples twice: each worker yields all of them, share them out": any(
            len(samples) - len(set(samples)) >= len(ranks) for samples in firsts
        ),
        "every epoch has the same order: set_epoch is not called": any(
            before.shuffles and before.samples == after.samples
            for rank in ranks
            for before, after in pairwise(rank.epochs)
        ),
        (
            "the ranks' weights differ: the model is not wrapped, or the loss does not come from"
            " its wrapper"
        ): any(not torch.equal(left, right) for left, right in pairwise(weights)),
        f"ranks {writers} all write the checkpoint: only rank 0 should": len(writers) > 1,
        "the checkpoint's names begin with \"module.\": it is the wrapper's, save the model's": any(
            name.startswith("module.") for rank in ranks for names in rank.saves for name in names
        ),
        "not seen: which samples the ranks train on, for no DataLoader was trained on": not any(
            rank.epochs for rank in ranks
        ),
        "not seen: whether the ranks' weights stay equal, for no optimizer made a step": (
            not weights
        ),
    }
    return [message for message, true in messages.items() if true]


def samples_of_first(epochs: list[Epoch]) -> list[int]:
    """The samples of a rank's first epoch, if it has one."""
    return epochs[0].samples if epochs else []


def run_watched(source: str, arguments: list[str]) -> Report:
    """Run the script as this rank's `__main__` and note what it does; the patches here end with the
    rank's process.
    """
    epochs: list[Epoch] = []
    optimizers = []
    states = []
    batches = data.DataLoader.__iter__
    save = torch.save

    def note_samples(loader):
        """Iterate over a DataLoader, and keep the samples of this pass."""
        epoch = Epoch([], getattr(loader.sampler, "shuffle", False))
        epochs.append(epoch)
        for batch in batches(loader):
            epoch.samples.extend(samples_of(batch))
            yield batch

    def note_step(optimizer, *_):
        """Keep the optimizer, and that it has trained on the latest pass over the data."""
        optimizers[:] = [optimizer]
        if epochs:
            epochs[-1].trained = True

    data.DataLoader.__iter__ = note_samples  # type: ignore[method-assign]
    torch.save = lambda state, *_, **__: states.append(state)
    # The launch has made the process group, and ends it.
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None  # type: ignore[assignment]
    register_optimizer_step_post_hook(note_step)
    try:
        run_script(source, arguments)
    finally:
        torch.save = save  # The launch itself saves this rank's result.
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    weights = [parameter.detach().reshape(-1) for parameters in groups for parameter in parameters]
    whole = torch.cat(weights).double() if weights else None
    trained = [epoch for epoch in epochs if epoch.trained]
    return Report(trained, list(map(names_of, states)), whole)


def run_script(source: str, arguments: list[str]) -> None:
    """Run the script as `__main__`, in the environment that torchrun gives; what it prints is not
    shown.
    """
    rank = str(dist.get_rank())
    world_size = str(dist.get_world_size())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size
    )
    sys.argv = ["script", *arguments]
    linecache.cache["script"] = (len(source), None, source.splitlines(True), "script")
    with redirect_stdout(StringIO()):
        exec(compile(source, "script", "exec"), {"__name__": "__main__"})


def samples_of(batch: Any) -> list[int]:
    """A checksum of each sample's content, which identifies the sample whatever its data set and
    sampler are.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    sums = []
    for parts in zip(*tensors, strict=False):
        content = b"".join(part.numpy(force=True).tobytes() for part in parts)
        sums.append(crc32(content))
    return sums


def names_of(state: Any) -> list[str]:
    """The names of all tensors in what was saved: a model, its state, or a dict that holds one."""
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    if not isinstance(state, dict):
        return []
    names = [str(name) for name, value in state.items() if isinstance(value, torch.Tensor)]
    return names + [name for value in state.values() for name in names_of(value)]
