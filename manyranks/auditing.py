"""The six usual mistakes of a training script, found by watching it run on a few ranks.

    audit(source)      -> a line for each mistake; [] for a script without one

`source` is the text of a script for torchrun. While it runs, the audit notes what its DataLoaders
yield, what `torch.save` is given, and the weights of the optimizer that steps.
"""

import linecache
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
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

from .launching.launch import launch
from .torch_inside import tree_leaves

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
        given = [argument.replace(FOLDER, folder) for argument in arguments]
        reports = launch(run_watched, source, given, world_size=2, device="cpu")
    return list(mistakes(reports))


def mistakes(ranks: list[Report]) -> Iterator[str]:
    """Yield a line for each mistake that the ranks' reports show, and for what they cannot show."""
    world_size = len(ranks)
    # The samples of each rank's first epoch. A sampler's padding repeats fewer than `world_size`.
    shares = [rank.epochs[0].samples for rank in ranks if rank.epochs]
    if any(len(set(one) & set(other)) >= world_size for one, other in pairwise(shares)):
        yield "ranks train on the same samples: no DistributedSampler"
    if any(len(share) - len(set(share)) >= world_size for share in shares):
        yield "a rank trains on samples twice: each worker yields all of them, share them out"
    neighbours = [pair for rank in ranks for pair in pairwise(rank.epochs)]
    if any(epoch.shuffles and epoch.samples == later.samples for epoch, later in neighbours):
        yield "every epoch has the same order: set_epoch is not called"
    weights = [rank.weights for rank in ranks if rank.weights is not None]
    if any(not torch.equal(one, other) for one, other in pairwise(weights)):
        yield (
            "the ranks' weights differ: the model is not wrapped, or the loss does not come from"
            " its wrapper"
        )
    writers = [number for number, rank in enumerate(ranks) if rank.saves]
    if len(writers) > 1:
        yield f"ranks {writers} all write the checkpoint: only rank 0 should"
    names = [name for rank in ranks for saved in rank.saves for name in saved]
    if any(name.startswith("module.") for name in names):
        yield "the checkpoint's names begin with \"module.\": it is the wrapper's, save the model's"
    if not shares:
        yield "not seen: which samples the ranks train on, for no DataLoader was trained on"
    if not weights:
        yield "not seen: whether the ranks' weights stay equal, for no optimizer made a step"


def run_watched(source: str, arguments: list[str]) -> Report:
    """Run the script as this rank's `__main__` and note what it does; the patches here end with the
    rank's process.
    """
    epochs = []
    saves = []
    groups = []  # These are the parameters of the optimizer that made the last step.
    iterate = data.DataLoader.__iter__
    save = torch.save

    def note_samples(loader):
        """Iterate over a DataLoader, and keep the samples of this pass."""
        epoch = Epoch([], getattr(loader.sampler, "shuffle", False))
        epochs.append(epoch)
        for batch in iterate(loader):
            epoch.samples.extend(samples_of(batch))
            yield batch

    def note_step(optimizer, *_):
        """Keep the optimizer's parameters, and that the latest pass over the data trained."""
        nonlocal groups
        groups = optimizer.param_groups
        if epochs:
            epochs[-1].trained = True

    data.DataLoader.__iter__ = note_samples  # type: ignore[method-assign]
    torch.save = lambda state, *_, **__: saves.append(names_of(state))
    # The launch has made the process group, and ends it.
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None  # type: ignore[assignment]
    register_optimizer_step_post_hook(note_step)
    try:
        run_script(source, arguments)
    finally:
        torch.save = save  # The launch itself saves this rank's result.
    vectors = [tensor.detach().reshape(-1) for group in groups for tensor in group["params"]]
    weights = torch.cat(vectors).double() if vectors else None
    trained_epochs = [epoch for epoch in epochs if epoch.trained]
    return Report(trained_epochs, saves, weights)


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
    # From here a traceback takes the lines that it shows.
    linecache.cache["script"] = (len(source), None, source.splitlines(True), "script")
    with redirect_stdout(StringIO()):
        exec(compile(source, "script", "exec"), {"__name__": "__main__"})


def samples_of(batch: Any) -> list[int]:
    """A checksum of each sample's content, which identifies the sample whatever its data set and
    sampler are.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    checksums = []
    # Row i of the inputs, of the targets and of what else there is belong to sample i.
    for rows in zip(*tensors, strict=False):
        content = b"".join(row.numpy(force=True).tobytes() for row in rows)
        checksums.append(crc32(content))
    return checksums


def names_of(state: Any) -> list[str]:
    """The names of all tensors in what was saved: a model, its state, or a dict that holds one."""
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    if not isinstance(state, dict):
        return []
    names = [str(name) for name, value in state.items() if isinstance(value, torch.Tensor)]
    for value in state.values():
        names += names_of(value)
    return names
