"""The usual mistakes of a training script, found by watching it run on a few ranks.

    audit(source)      -> a line for each mistake; [] for a script without one

`source` is the text of a script for torchrun. While it runs, the audit notes what its DataLoaders
yield, what `torch.save` is given, which passes go through a wrapper, how many targets a
cross-entropy counts, and the weights of the optimizer that steps.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import data

from .launching.launch import launch
from .memory import remember_source
from .torch_inside import tree_leaves

# Wrappers are known by the names of their classes, torch's and others'.
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "BucketedDDP"}
MISSING = "a step uses the gradients of the step before once more: zero_grad() is not called"
FOLDER = "FOLDER"  # In the arguments this word stands for a temporary folder.


@dataclass
class Epoch:
    """One pass of a rank over a DataLoader.

    `samples` are checksums; `shuffles` says whether set_epoch can shuffle them, and `trained`
    whether an optimizer made a step during the pass.
    """

    samples: list[int]
    shuffles: bool
    trained: bool = False


class Report(NamedTuple):
    """What one rank did.

    `epochs` are those in which the rank trained, `saves` the names of the tensors in each file that
    it saved, `weights` those at the end, `counted` the share of targets in each loss, and `lines`
    the mistakes that the rank sees for itself.
    """

    epochs: list[Epoch]
    saves: list[list[str]]
    weights: torch.Tensor | None
    why_weights_differ: str
    counted: list[float]
    lines: list[str]


def audit(source: str, arguments: Sequence[str] = (FOLDER,)) -> list[str]:
    """Run a script on two ranks; return a line for each mistake, and for what was not seen."""
    with tempfile.TemporaryDirectory() as folder:
        given = [argument.replace(FOLDER, folder) for argument in arguments]
        reports = launch(run_watched, source, given, world_size=2, device="cpu")
    return list(mistakes(reports))


def mistakes(ranks: list[Report]) -> Iterator[str]:
    """Yield a line for each mistake that the reports show, and for what they cannot show."""
    world_size = len(ranks)
    # Shares are compared by their first epoch. A sampler's padding repeats fewer than `world_size`.
    shares = [rank.epochs[0].samples for rank in ranks if rank.epochs]
    own_lines = list(dict.fromkeys(line for rank in ranks for line in rank.lines))
    yield from own_lines
    told = any("num_replicas" in line for line in own_lines)
    same = any(len(set(one) & set(other)) >= world_size for one, other in pairwise(shares))
    if same and not told:
        yield "ranks train on the same samples: no DistributedSampler"
    if any(len(share) - len(set(share)) >= world_size for share in shares):
        yield "a rank trains on samples twice: each worker yields all of them, share them out"
    neighbours = [pair for rank in ranks for pair in pairwise(rank.epochs)]
    if any(epoch.shuffles and epoch.samples == later.samples for epoch, later in neighbours):
        yield "every epoch has the same order: set_epoch is not called"
    weights = [rank.weights for rank in ranks if rank.weights is not None]
    if any(not torch.equal(one, other) for one, other in pairwise(weights)):
        yield f"the ranks' weights differ: {ranks[0].why_weights_differ}"
    if any(rank.counted != ranks[0].counted for rank in ranks):
        yield (
            "the loss is a mean over another number of targets on every rank, for it leaves some"
            " out or weighs them: sum it, and divide by the mean number of all ranks"
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
    """Run the script as this rank's `__main__` and note what it does.

    The patches here end with the rank's process.
    """
    watch = Watch()
    save = torch.save
    iterate = data.DataLoader.__iter__
    loaders: Any = data.DataLoader  # The stubs do not know that a method can be patched.
    loaders.__iter__ = lambda loader: watch.samples(loader, iterate(loader))
    torch.save = lambda state, *_, **__: watch.saves.append(names_of(state))
    # The launch makes and ends the process group, so the script does neither.
    dist.init_process_group = watch.init_process_group  # type: ignore[assignment]
    dist.destroy_process_group = lambda *_, **__: None
    functional.cross_entropy = watch.around_cross_entropy(functional.cross_entropy)  # type: ignore[assignment]
    register_module_forward_pre_hook(watch.forward)
    kinds: list[Any] = [torch.nn.Module, torch.optim.Optimizer]
    for kind in kinds:
        kind.zero_grad = watch.around_zero_grad(kind.zero_grad)
    register_optimizer_step_pre_hook(watch.before_step)
    register_optimizer_step_post_hook(watch.after_step)
    try:
        run_script(source, arguments)
    finally:
        torch.save = save  # The launch itself saves this rank's result.
    return watch.report()


class Watch:
    """What a rank's script does, noted by hooks and patches."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []
        self.saves: list[list[str]] = []
        # These are the parameters of the optimizer that made the last step.
        self.groups: list[Any] = []
        self.counted: list[float] = []  # the share of targets, or their mean weight, in each loss
        self.lines: list[str] = []
        # This says of each forward pass of a wrapper since the last step whether it is in
        # no_sync().
        self.passes: list[bool] = []
        self.called = False  # Some forward pass went through a wrapper.
        self.local_step = False  # A step came right after a pass in no_sync.
        self.cleared = True  # There was a zero_grad() since the last step.
        # These gradients were used by the last step, and found again by a forward pass.
        self.old: dict[Any, Any] = {}

    def samples(self, loader: Any, batches: Iterator) -> Iterator:
        """Iterate over a DataLoader's batches, and keep the samples of this pass."""
        sampler = loader.sampler
        ranks = dist.get_world_size()
        if getattr(sampler, "num_replicas", ranks) != ranks:
            self.lines.append(
                f"ranks train on the same samples: the sampler is told num_replicas="
                f"{sampler.num_replicas}, and {ranks} ranks train"
            )
        epoch = Epoch([], getattr(sampler, "shuffle", False))
        self.epochs.append(epoch)
        for batch in batches:
            epoch.samples.extend(samples_of(batch))
            yield batch

    def init_process_group(self, *_: Any, world_size: int = -1, rank: int = -1, **__: Any) -> None:
        """Note a mistake if the script itself says how many ranks there are, and says it wrong."""
        if world_size not in (-1, dist.get_world_size()) or rank not in (-1, dist.get_rank()):
            self.lines.append(
                f"init_process_group is told rank={rank}, world_size={world_size}: every process"
                " would train alone; leave both out, torchrun says them"
            )

    def forward(self, module: torch.nn.Module, _: Any) -> None:
        """Note a pass through a wrapper, and which gradients of the last step are still there."""
        if not torch.is_grad_enabled() or type(module).__name__ not in WRAPPERS:
            return
        self.called = True
        self.passes.append(not getattr(module, "require_backward_grad_sync", True))
        if len(self.passes) == 1:
            self.old = {p: p.grad for p in self.parameters() if p.grad is not None and p.grad.any()}

    def around_zero_grad(self, zero_grad: Callable) -> Callable:
        """Return a `zero_grad` that also notes that it was called."""

        def cleared(*arguments, **settings):
            self.cleared = True
            return zero_grad(*arguments, **settings)

        return cleared

    def around_cross_entropy(self, cross_entropy: Callable) -> Callable:
        """Return a `cross_entropy` that also notes the share of targets that its mean counts."""

        def counted(inputs, targets, weight=None, *others, ignore_index=-100, **settings):
            if torch.is_grad_enabled() and not targets.is_floating_point():
                kept = targets[targets != ignore_index]
                count = kept.numel() if weight is None else weight[kept].sum().item()
                if settings.get("reduction", "mean") == "mean":
                    self.counted.append(count / max(1, targets.numel()))
            return cross_entropy(
                inputs, targets, weight, *others, ignore_index=ignore_index, **settings
            )

        return counted

    def before_step(self, *_: Any) -> None:
        """Note whether the last step's gradients are used again, and if the last pass was local."""
        again = [p for p, grad in self.old.items() if p.grad is grad]
        if again and not self.cleared and MISSING not in self.lines:
            self.lines.append(MISSING)
        self.local_step = self.local_step or self.passes[-1:] == [True]

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the optimizer's parameters, and note that the latest pass over the data trained."""
        self.groups = optimizer.param_groups
        self.passes = []
        self.old = {}
        self.cleared = False
        if self.epochs:
            self.epochs[-1].trained = True

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of the optimizer that made the last step."""
        return [parameter for group in self.groups for parameter in group["params"]]

    def report(self) -> Report:
        """Return what this rank did."""
        why = "the model is not wrapped, or the loss does not come from its wrapper"
        if self.local_step:
            why = (
                "the last forward pass before step() was in no_sync(); gradients are accumulated in"
                " no_sync() in all micro-batches but the last"
            )
        elif self.called:
            why = (
                "not every backward pass is averaged, as with two forward passes before their"
                " backward passes, passes by way of .module, or parameters exchanged after wrapping"
            )
        vectors = [parameter.detach().reshape(-1) for parameter in self.parameters()]
        weights = torch.cat(vectors).double() if vectors else None
        trained_epochs = [epoch for epoch in self.epochs if epoch.trained]
        return Report(trained_epochs, self.saves, weights, why, self.counted, self.lines)


def run_script(source: str, arguments: list[str]) -> None:
    """Run the script as `__main__`, without its output; a launch has torchrun's environment."""
    sys.argv = ["script", *arguments]
    remember_source("script", source)
    with redirect_stdout(StringIO()):
        exec(compile(source, "script", "exec"), {"__name__": "__main__"})


def samples_of(batch: Any) -> list[int]:
    """Return a checksum of each sample's content.

    It identifies a sample whatever the data set and the sampler are.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    checksums = []
    # Row i of each tensor, such as the inputs and the targets, belongs to sample i.
    for rows in zip(*tensors, strict=False):
        content = b"".join(row.numpy(force=True).tobytes() for row in rows)
        checksums.append(crc32(content))
    return checksums


def names_of(state: Any) -> list[str]:
    """Return the names of all tensors in what was saved: a model, a state, or a dict of these."""
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    if not isinstance(state, dict):
        return []
    names = [str(name) for name, value in state.items() if isinstance(value, torch.Tensor)]
    for value in state.values():
        names += names_of(value)
    return names
