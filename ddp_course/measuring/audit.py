"""The five usual mistakes of a training script, found by watching it run on a few ranks.

    audit(source)      -> [] for a script without them, else a line for each

`source` is the text of a module with a function `main(folder)` that returns its model, like `ddp_course.script`.
"""

import os
import tempfile
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from ..running.launching.launch import launch


def audit(source: str, world_size: int = 2) -> list[str]:
    """Run the script on `world_size` ranks and say what is wrong with it, mistake by mistake."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = launch(watched, source, folder, world_size=world_size, device="cpu")
    epochs, saved, weights = zip(*ranks, strict=True)
    writers = [rank for rank, names in enumerate(saved) if names]
    found = {
        "ranks train on the same samples: no DistributedSampler": shared_samples(epochs),
        "every epoch has the same order: set_epoch is not called": any(len(e) > 1 and e[0] == e[1] for e in epochs),
        "the ranks' weights differ: the loss comes from the model, not from its wrapper": any(
            not torch.equal(weights[0], other) for other in weights[1:]
        ),
        f"ranks {writers} all write the checkpoint: only rank 0 should": len(writers) > 1,
        "the checkpoint's names begin with \"module.\": it is the wrapper's, save the model's": any(
            name.startswith("module.") for names in saved for name in names
        ),
    }
    return [message for message, true in found.items() if true]


def shared_samples(epochs: tuple[list[list[int]], ...]) -> bool:
    """Whether two ranks saw the same samples in their first epoch, but for the few that fill up the last round."""
    seen = [set(rank[0]) for rank in epochs]
    return any(len(seen[0] & other) >= len(epochs) for other in seen[1:])


def watched(source: str, folder: str) -> tuple[list[list[int]], list[str], torch.Tensor]:
    """One rank: samples by epoch, names of the saved tensors, and the weights after the script has run."""
    epochs, saved = [], []
    begin, pick = DataLoader.__iter__, TensorDataset.__getitem__

    def started(loader):
        epochs.append([])
        return begin(loader)

    def picked(data, index):
        epochs[-1].append(int(index))
        return pick(data, index)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (DataLoader, "__iter__", started),
            (TensorDataset, "__getitem__", picked),
            (torch, "save", lambda state, path: saved.extend(map(str, state["model"]))),
            (dist, "init_process_group", lambda *_, **__: None),  # the launch has made it, and will end it
            (dist, "destroy_process_group", lambda *_, **__: None),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(redirect_stdout(StringIO()))  # what the script prints is not what is looked at
        stack.enter_context(patch.dict(os.environ, LOCAL_RANK=str(dist.get_rank())))
        module: dict[str, Any] = {"__name__": "script"}
        exec(compile(source, "script", "exec"), module)
        model = module["main"](folder)
    return epochs, saved, torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
