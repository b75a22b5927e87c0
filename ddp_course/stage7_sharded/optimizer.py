"""ZeRO-1, which is stage 4's ring with the update in the middle.

    reduce-scatter    rank r ends up with the average of chunk r+1 of the gradients
    update            rank r updates chunk r+1 of the parameters, by an optimizer that keeps state
                      for this chunk only
    allgather         all ranks get the updated chunks

So it sends as much as stage 4 and keeps 1/K of the optimizer's state.
"""

import torch

from ..base.replicas import check_replicas
from ..communication import failing_together
from ..same_model import same_on_all_ranks
from ..stage3_paramserver import broadcast_parameters
from ..stage5_bucketed import assign_buckets
from .blocks import Sharded
from .clipping import clip_grad_norm_
from .flat import (
    Flat,
    Shard,
    gather_chunks,
    load_whole_state_dict,
    used_on_any_rank,
    whole_state,
)
from .parts import OwnGradient, Part, refuse_with

NOTHING_TO_AVERAGE = (
    "no parameter of this optimizer has a gradient on any rank: backward() comes before step(); or"
    " the model has had other parameters since the optimizer was made, as after"
    " load_state_dict(…, assign=True). Write new values into the same parameters, by"
    " load_state_dict() or copy_(…), or make the optimizer anew"
)


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO-1: average the gradients, update this rank's shard, and gather all ranks' shards.

    `params` are as for any optimizer, also in groups. `optimizer_cls(**kwargs)` must work element
    by element, as SGD and Adam do: then results equal those of the unsharded optimizer bit for bit.
    Training starts from rank 0's parameters. Every rank calls `backward()` on its own share of the
    batch, with no wrapper, and then `step()`, which uses the gradients up. Raises ValueError for an
    optimizer that looks at whole tensors.
    """

    def __init__(self, params, optimizer_cls, group=None, **kwargs):
        super().__init__(params, check_elementwise(optimizer_cls, kwargs).defaults)
        self.group = group
        self.averaged = False
        self.parameters = torch.nn.ParameterList(
            p for members in self.param_groups for p in members["params"]
        )
        if any(isinstance(parameter, Shard | Sharded) for parameter in self.parameters):
            raise ValueError(
                "these are shards of FullyShardedDataParallel; give them to an ordinary optimizer"
            )
        named = dict(self.parameters.named_parameters(prefix="parameter"))
        check_replicas(named, group)
        same_on_all_ranks(named, group)
        broadcast_parameters(self.parameters, group=group)
        trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        buckets = [*assign_buckets(trainable), *assign_buckets(frozen)]
        self.flats = [Flat(bucket, group) for bucket in buckets]
        self.shards = {
            parameter: shard for flat in self.flats for parameter, shard in flat.shards.items()
        }
        shards = []
        for members in self.param_groups:
            own = [self.shards[parameter] for parameter in members["params"]]
            shards.append({**members, "params": own})
        self.local = optimizer_cls(shards, **kwargs)
        self.add_param_group = refuse_with(
            "the shards are laid out already; make a new optimizer of all the parameters"
        )
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(mark_as_own)

    @torch.no_grad()
    def average(self):
        """Reduce-scatter the gradients: the average of this rank's chunk goes to the shards.

        Raises RuntimeError for a parameter that lies in other memory than before, and for new
        gradients after clipping.
        """
        if any(
            p.data_ptr() != view.data_ptr()
            for flat in self.flats
            for p, view in flat.views(flat.full).items()
        ):
            raise RuntimeError(
                "a parameter lies in other memory than when its optimizer was made: convert and"
                " move a model before, write values by parameter.copy_(…), and make one optimizer"
                " only"
            )
        if self.averaged and any(parameter.grad is not None for parameter in self.parameters):
            raise RuntimeError(
                "there are new gradients, but those clipped before have not been used: call step()"
                " or zero_grad() of the optimizer after clipping"
            )
        if self.averaged:
            return
        used = {parameter for parameter in self.parameters if parameter.grad is not None}
        with failing_together(self.group):
            used = used_on_any_rank(self.shards, used, self.flats[0].full.device, self.group)
        if not used:
            raise RuntimeError(NOTHING_TO_AVERAGE)
        with failing_together(self.group):
            for flat in self.trainable():
                flat.make_room_for_gradients()
                for parameter in list(flat.places):
                    if parameter.grad is not None:
                        flat.put_gradient(parameter)
                flat.average(self.group)
                flat.hand_out_averages(used)
        self.averaged = True

    @torch.no_grad()
    def step(self, closure=None):
        """Average the gradients, update this rank's shard, and gather all shards.

        Each rank sends 2 (K-1)/K p bytes, and a bitmap with a number for each parameter.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for members, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local.update({key: value for key, value in members.items() if key != "params"})
        self.average()
        with failing_together(self.group):
            self.averaged = False
            self.local.step()
            for flat in self.trainable():
                gather_chunks(flat.chunks, self.group)
        self.zero_grad()
        return loss

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, even those that `clip_grad_norm_` has averaged already."""
        super().zero_grad(set_to_none)
        self.local.zero_grad()
        self.averaged = False

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Average the gradients and scale them to a norm of at most `max_norm`.

        Return the norm before. Raises RuntimeError for gradients of a split model, whose norm no
        rank knows.
        """
        if any(isinstance(parameter, Part) for parameter in self.parameters):
            raise RuntimeError(
                "these gradients are parts in two ways, of a split model and a sharded optimizer:"
                " their norm is not known; stage 6 around a split model can clip"
            )
        self.average()
        return clip_grad_norm_(
            self.shards.values(), max_norm, norm_type, self.group, self.flats[0].full.device
        )

    def trainable(self):
        """Return the flat tensors in which some parameter is trainable."""
        flats = []
        for flat in self.flats:
            if any(parameter.requires_grad for parameter in flat.parameters):
                flats.append(flat)
        return flats

    def state_dict(self):
        """Return the unsharded optimizer's state dict, the same on all ranks; all call this."""
        with failing_together(self.group):
            return {
                **super().state_dict(),
                "state": whole_state(self.local, self.flats, self.group),
            }

    def load_state_dict(self, state_dict):
        """Take this rank's shards out of the state dict of an unsharded optimizer.

        The state dict may also be of a sharded optimizer on any number of ranks.
        """
        load_whole_state_dict(self.local, self.flats, state_dict)
        super().load_state_dict({**state_dict, "state": {}})


def check_elementwise(optimizer_cls, kwargs):
    """Return an optimizer that was tried on a part of a matrix.

    Raises ValueError if it needs the whole matrix.
    """
    trial = Shard(torch.ones(2, 1))
    trial.grad = torch.ones(2, 1)
    try:
        optimizer = optimizer_cls([trial], **kwargs)
        optimizer.step()
    except Exception as error:
        raise ValueError(
            f"{optimizer_cls} cannot work on shards; try AdamW. It ends with: {error}"
        ) from error
    return optimizer


def mark_as_own(parameter):
    """Mark a new gradient as this rank's own, because it is not averaged yet; this is a hook."""
    # Sparse tensors have no subclasses.
    if not parameter.grad.is_sparse:
        parameter.grad = parameter.grad.as_subclass(OwnGradient)
