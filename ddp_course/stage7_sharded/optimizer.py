"""ZeRO-1 is stage 4's ring with the update in the middle:

    reduce-scatter    rank r ends up with the average of chunk r+1 of the gradients
    update            of this chunk of the parameters, by an optimizer that keeps state for this chunk only
    allgather         of the updated chunks

So it sends as much as stage 4 and keeps 1/K of the optimizer's state.
"""

import weakref
from contextlib import contextmanager

import torch

from ..stage3_paramserver import broadcast_parameters
from ..stage5_bucketed import assign_buckets
from ..stage6_ddp.checks import same_on_all_ranks
from .clipping import OwnGradient, Part, clip_grad_norm_
from .flat import flats, gather_chunks, load_whole_state_dict, sum_chunks, whole_state


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO-1: averages the gradients, updates this rank's shard of the parameters, and shares it with the others.

    `params` as for any optimizer, groups too; `optimizer_cls(**kwargs)` must work element by element, as SGD, Adam
    and AdamW do: then results equal those of the unsharded optimizer bit for bit. Every rank calls `backward()` on its
    own share of the batch, with no wrapper, and then `step()`, which uses the gradients up. Training starts from rank
    0's parameters. Learning rate schedulers see one optimizer; gradients are clipped by `clip_grad_norm_`, before
    `step()`. Raises ValueError for an optimizer that looks at whole tensors.
    """

    def __init__(self, params, optimizer_cls, group=None, **kwargs):
        check_elementwise(optimizer_cls, kwargs)
        self.group, self.flats, self.shards, self.local = group, [], {}, None
        self.averaged, self.broken = False, None
        super().__init__(params, kwargs)
        self.lay_out(self.parameters())
        self.local = optimizer_cls([self.sharded(members) for members in self.param_groups], **kwargs)
        self.defaults = self.local.defaults
        self.take_settings()

    def take_settings(self):
        """Tell the settings of the inner optimizer as our own."""
        for members, local in zip(self.param_groups, self.local.param_groups, strict=True):
            members.update({key: value for key, value in local.items() if key != "params"})

    def lay_out(self, parameters):
        """Cut `parameters` into shards, bucket by bucket, and guard their gradients, which are not averages yet."""
        if any(hasattr(parameter, "is_shard") for parameter in parameters):
            raise ValueError("these are shards of FullyShardedDataParallel; give them to an ordinary optimizer")
        same_on_all_ranks({f"parameter {n}": parameter for n, parameter in enumerate(parameters)}, self.group)
        broadcast_parameters(torch.nn.ParameterList(parameters), group=self.group)
        for parameter in parameters:
            parameter.optimizer = weakref.ref(self)
        made = [flat for bucket in assign_buckets(parameters) for flat in flats(bucket, self.group)]
        self.flats += made
        self.shards.update({parameter: shard for flat in made for parameter, shard in flat.shards.items()})
        if len(made[0].chunks) > 1:
            trainable = [parameter for parameter in parameters if parameter.requires_grad]
            handles = [parameter.register_post_accumulate_grad_hook(guard) for parameter in trainable]
            weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def sharded(self, members):
        """A parameter group with this rank's shards in place of the parameters."""
        return {**members, "params": [self.shards[parameter] for parameter in members["params"]]}

    def add_param_group(self, param_group):
        """Train more parameters from now on; all ranks must call this."""
        super().add_param_group(param_group)
        if self.local is not None:
            self.lay_out(self.param_groups[-1]["params"])
            self.local.add_param_group(self.sharded(self.param_groups[-1]))

    def check_whole(self):
        """Raise RuntimeError if an earlier call broke off, or another optimizer has laid the parameters out anew."""
        if any(parameter.optimizer() is not self for parameter in self.parameters()):
            raise RuntimeError("another ShardedOptimizer was made for these parameters since; use that one alone")
        if self.broken:
            raise RuntimeError(
                f"an earlier call ended in the middle of what the ranks do together, with {self.broken}; "
                "the other ranks may have gone on, so this one cannot: start the ranks again"
            )

    @contextmanager
    def together(self):
        """Around collectives: a rank that leaves this block by an exception leaves the other ranks in the middle."""
        self.check_whole()
        try:
            yield
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise

    @torch.no_grad()
    def average(self):
        """Reduce-scatter the gradients: the average of this rank's chunk goes to the shards."""
        self.check_whole()
        for flat in self.flats:
            flat.check_home()
        if self.averaged and any(parameter.grad is not None for parameter in self.parameters()):
            raise RuntimeError(
                "there are new gradients, but those clipped before have not been used: after clip_grad_norm_ call "
                "step(), or zero_grad() of this optimizer to drop them (the model's zero_grad() does not know of them)"
            )
        with self.together():
            for flat in [] if self.averaged else self.trainable():
                for parameter in flat.collect():
                    if parameter.grad is not None:
                        flat.take(parameter)
                flat.average(sum_chunks, self.group)
                flat.give()
        self.averaged = True

    @torch.no_grad()
    def step(self, closure=None):
        """Average the gradients, update this rank's shard, gather everyone's: each rank sends 2 (K-1)/K p bytes."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for members, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local.update({key: value for key, value in members.items() if key != "params"})
        self.average()
        with self.together():
            self.local.step()
            for flat in self.trainable():
                gather_chunks(flat.chunks, self.group)
        self.zero_grad()
        return loss

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, those that `clip_grad_norm_` has averaged already too."""
        super().zero_grad(set_to_none)
        self.local.zero_grad()
        self.averaged = False

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Average the gradients and scale them so that their norm is at most `max_norm`; return the norm."""
        self.average()
        with self.together():
            return clip_grad_norm_(self.shards.values(), max_norm, norm_type, self.group, self.flats[0].full.device)

    def trainable(self):
        """The parameters laid out together of which some are trainable."""
        return [flat for flat in self.flats if any(parameter.requires_grad for parameter in flat.parameters)]

    def state_dict(self):
        """Return the state dict of the unsharded optimizer, the same on every rank; all ranks must call this."""
        with self.together():
            state = whole_state(self.local, self.flats, self.parameters(), self.group)
        return {**super().state_dict(), "state": state}

    def load_state_dict(self, state_dict):
        """Take this rank's shards out of the state dict of an unsharded optimizer, or of any number of ranks."""
        load_whole_state_dict(self.local, self.flats, self.parameters(), state_dict)
        self.take_settings()

    def parameters(self):
        """All parameters in the order of their groups."""
        return [parameter for members in self.param_groups for parameter in members["params"]]


def check_elementwise(optimizer_cls, kwargs):
    """Try the optimizer on a part of a matrix; ValueError if it needs the whole."""
    trial = torch.nn.Parameter(torch.ones(2, 1))
    trial.grad = torch.ones(2, 1).as_subclass(Part)
    try:
        optimizer_cls([trial], **kwargs).step()
    except Exception as error:
        raise ValueError(f"{optimizer_cls} cannot work on shards; try AdamW. It ends with: {error}") from error


def guard(parameter):
    """The hook: a gradient that has just been computed is this rank's own, not the average."""
    if not parameter.grad.is_sparse:  # sparse tensors have no subclasses
        parameter.grad = parameter.grad.as_subclass(OwnGradient)
