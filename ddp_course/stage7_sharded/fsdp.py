"""ZeRO-3: hooks that have each block whole just while it computes, and the next one on its way.

On CUDA nothing waits but streams, and the processor is far ahead of them. So memory has an owner: whole parameters
belong to the stream of the gathers, whole gradients to that of the computation. They are allocated and
freed in the training thread, and the next user of the memory waits for an event that was recorded after it was freed.
So at most two blocks are whole, and two blocks' gradients, however far ahead the processor is.
"""

from contextlib import suppress
from functools import partial

import torch

from ..running import communication, wire
from ..running.torch_inside import after_backward, backward_pass, tree_map_only, uncompiled
from ..stage3_paramserver import broadcast_parameters
from ..stage6_ddp.buffers import broadcast_tensors
from ..stage6_ddp.checks import same_on_all_ranks
from ..stage6_ddp.unused import tensors_in
from .blocks import Block, Sharded, assign_blocks, default_blocks
from .clipping import clip_grad_norm_
from .flat import like, load_whole_state_dict, meet, whole_state

copied = partial(tree_map_only, torch.Tensor, lambda tensor: tensor.detach().cpu().clone())


class FullyShardedDataParallel(torch.nn.Module):
    """ZeRO-3: parameters, gradients and optimizer state in shards; a block is whole only while it computes.

    `blocks`: the submodules to gather one at a time, by default the members of every outermost Sequential or
    ModuleList; what is in none of them forms one more block. Every rank must run the same blocks in the same order.
    `parameters()` are this rank's shards: make the optimizer (any that works element by element)
    from them, after wrapping; clip gradients by `clip_grad_norm_`. `state_dict()` is the ordinary one of the whole
    model; all ranks must call it. Raises ValueError if nothing is trainable, or something is sharded already.
    """

    def __init__(self, module, blocks=None, process_group=None, prefetch=True):
        super().__init__()
        named = dict(module.named_parameters())
        check_wrappable(module, named)
        same_on_all_ranks(named, process_group)
        broadcast_parameters(module, group=process_group)
        members = assign_blocks(module, default_blocks(module) if blocks is None else blocks)
        self.module, self.group, self.prefetch = module, process_group, prefetch
        self.names = {parameter: name for name, parameter in named.items()}
        self.blocks = [Block(number, *member, process_group) for number, member in enumerate(members)]
        self.flats = [flat for block in self.blocks for flat in block.flats]
        self.shards = {parameter: shard for flat in self.flats for parameter, shard in flat.shards.items()}
        for name, parameter in named.items():
            self._parameters[name] = shard = self.shards[parameter]
            shard.is_shard, shard.register_hook, shard.register_post_accumulate_grad_hook = True, refuse, refuse
        self._ddp_params_and_buffers_to_ignore = list(named)  # torch's DDP around this refuses: nothing is left for it
        self.thread, self.device = communication.communication_thread(process_group), self.flats[0].full.device
        self.gathers = torch.cuda.Stream(self.device) if communication.is_queued(self.device) else None
        self.latest, self.reducing, self.backward_pass, self.passes, self.trained = None, [], None, 0, True
        self.handles = [handle for block in self.blocks for handle in self.watch(block)]
        self.free_all()

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        """The wrapper alone, so that the parameters of it, and of a model around it, are the shards."""
        memo = set() if memo is None else memo
        if self not in memo:
            memo.add(self)
            yield prefix, self

    def watch(self, block):
        """Register the hooks that gather, free and reduce `block` at the right moments: first before, last behind."""
        yield block.module.register_forward_pre_hook(lambda *_: self.before_forward(block), prepend=True)
        yield block.module.register_forward_hook(lambda module, inputs, outputs: self.after_forward(block, outputs))
        for parameter in block.flat_of:
            yield parameter.register_post_accumulate_grad_hook(lambda ready: self.gradient_ready(block, ready))

    @uncompiled
    def forward(self, *args, **kwargs):
        """What the module returns; its blocks are gathered one after the other."""
        self.check_usable()
        if recomputing():
            return self.module(*args, **kwargs)
        trains = self.training and torch.is_grad_enabled()
        if trains != self.trained:  # an evaluation begins or ends, and rank 0 may be alone in it
            meet("a forward pass of a sharded model", self.group)
            self.trained = trains
        self.start_over()  # the pass before may have ended with an exception
        self.passes += 1
        outputs = self.module(*args, **kwargs)
        self.free_all()  # a block may have been gathered ahead and not used
        return outputs

    def check_usable(self):
        """Raise RuntimeError if the wrapper is at its end, or parameters were frozen or unfrozen behind its back."""
        if not self.handles:
            raise RuntimeError("restore() has made the module an ordinary one again; use that, or wrap it anew")
        changed = [name for p, name in self.names.items() if p.requires_grad != self.shards[p].requires_grad]
        if changed:
            raise RuntimeError(f"requires_grad of {changed[0]} was changed after wrapping; freeze parameters before")

    def start_over(self):
        """Wait for messages on their way, and forget what a pass that broke off has left behind."""
        reducing, self.reducing, self.backward_pass, self.latest = self.reducing, [], None, None
        for wait in reducing:
            with suppress(Exception):  # the communication thread raises the error again in its next job
                wait()
        for block in self.blocks:
            block.start_over()

    def before_forward(self, block):
        """Have `block` whole before it computes."""
        if recomputing():
            self.request(block)()
        else:
            self.enter(block, "forward")

    def enter(self, block, phase):
        """Have `block` whole before it computes, and start to gather the block that came after it last time."""
        if self.latest is not None:
            self.latest.following[phase] = block
        self.latest = block
        here = self.request(block)
        with wire.span("wait"):
            here()
        if self.prefetch and phase in block.following:
            self.request(block.following[phase])

    def request(self, block):
        """Start to gather `block` unless it is here or on its way; returns a function that waits for it."""
        if block.gathering is None:
            with communication.working_on(self.gathers):
                block.make_room()
            block.gathering = self.start(block.gather, self.gathers)
        return block.gathering

    def start(self, work, stream=None):
        """Queue work for the communication thread, which tells the other ranks' apart by pass and direction."""
        moment = f"{'backward' if self.backward_pass else 'forward'} {self.passes}"
        return self.thread.start(partial(work, moment), self.device, stream)

    def after_forward(self, block, outputs):
        """Free the block after its forward pass, and be told when backward reaches its outputs."""
        version = block.version
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.before_backward(block, version))
        if not recomputing():
            block.free()

    def before_backward(self, block, version):
        """Gather the block again, as it was in forward, and make room for its gradients."""
        self.begin_backward()
        if block.missing is None:
            if block.version != version:
                raise RuntimeError(
                    "the parameters have changed since the forward pass, by optimizer.step() or load_state_dict(): "
                    "the gradients would belong to neither; call backward() first"
                )
            self.enter(block, "backward")
            while self.gathers and len(self.reducing) > 1:
                self.reducing.pop(0)()  # the stream waits, and the gradients can go
            block.missing = {parameter for flat in block.trainable for parameter in flat.collect()}

    def begin_backward(self):
        """The first block that a backward pass reaches: have `finish` called at the end of this pass."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True would need the whole parameters after backward, when the ranks have let go of them; "
                "for gradients of gradients use stage 6"
            )
        running = backward_pass()
        if self.backward_pass is None:
            self.latest, self.backward_pass = None, running + 1
            after_backward(self.finish)
        elif self.backward_pass != running + 1:
            raise RuntimeError(
                "a backward pass began before another had ended: that one failed, and a new forward pass must come "
                "first; or this one is inside it (activation checkpointing: set use_reentrant=False)"
            )

    def gradient_ready(self, block, parameter):
        """The hook: once the last gradient of the block is complete, average them while backward goes on."""
        if block.missing is None:
            raise RuntimeError(
                f"{self.names[parameter]} got a gradient, but not by way of what its block returned: is it used "
                "elsewhere?"
            )
        block.flat_of[parameter].take(parameter)
        block.missing.discard(parameter)
        if not block.missing:
            self.reduce(block)

    def reduce(self, block):
        """Start to average the gradients of `block`; nobody needs its parameters any more."""
        for flat in block.trainable:
            flat.free()
        self.reducing.append(self.start(block.reduce))

    def finish(self):
        """Before `backward()` returns: average the blocks of which not all parameters took part; wait for all."""
        for block in self.blocks:
            if block.missing:
                self.reduce(block)
            block.missing = None
        reducing, self.reducing, self.backward_pass = self.reducing, [], None
        with wire.span("wait"):
            for wait in reducing:
                wait()
        for block in self.blocks:
            block.give()
        self.free_all()

    def free_all(self):
        """Let go of every block that is still whole."""
        for block in self.blocks:
            block.free()

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients so that the norm of the whole model's is at most `max_norm`; return the norm.

        All ranks must call this. `torch.nn.utils.clip_grad_norm_` refuses: it would take a shard for the whole.
        """
        return clip_grad_norm_(self.shards.values(), max_norm, norm_type, self.group, self.device)

    @torch.no_grad()
    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        """Return the state dict of the whole model, copies on the CPU; gathered block by block, all ranks alike.

        Buffers become those of rank 0 on all ranks, as in torch's DDP.
        """
        self.begin("state_dict()")
        state, whole = self.module.state_dict(keep_vars=True), {}
        for block in self.blocks:
            self.request(block)()
            whole.update((parameter, copied(parameter)) for flat in block.flats for parameter in flat.parameters)
            block.free()
        destination = {} if destination is None else destination
        for name, value in state.items():
            destination[prefix + name] = whole[value] if value in whole else copied(value)
        return destination

    def begin(self, what):
        """Have all ranks together for a call that gathers the model, with nothing on its way and rank 0's buffers."""
        self.check_usable()
        meet(f"{what} of a sharded model", self.group)
        self.start_over()
        broadcast_tensors(list(self.module.buffers()), group=self.group)

    @torch.no_grad()
    def load_state_dict(self, state):
        """Take this rank's shards out of the state dict of a whole model.

        Raises RuntimeError, with nothing changed, unless it has the names and shapes of this model.
        """
        self.check_usable()
        own = self.module.state_dict(keep_vars=True)
        theirs, ours = ({n: tuple(getattr(value, "shape", ())) for n, value in each.items()} for each in (state, own))
        for name in ours | theirs:
            if theirs.get(name) != ours.get(name):
                raise RuntimeError(
                    f"the state dict is of another model: {name} has shape {theirs.get(name)} there, and "
                    f"{ours.get(name)} in this model (None: there is no {name})"
                )
        self.start_over()
        outside = {parameter: piece[0] for flat in self.flats for parameter, piece in flat.pieces.items()}
        for name, value in own.items():
            if value in outside:
                self.shards[value].copy_(like(state[name].reshape(-1)[outside[value]], value))
        buffers = {name: state[name] for name, value in own.items() if value not in self.shards}
        self.module.load_state_dict(buffers, strict=False)

    def optimizer_state_dict(self, optimizer):
        """Return the state dict of an optimizer of `parameters()` as if nothing were sharded; all ranks call this."""
        state = whole_state(optimizer, self.flats, self.whole_parameters(optimizer), self.group)
        return {**optimizer.state_dict(), "state": state}

    def load_optimizer_state_dict(self, optimizer, state_dict):
        """Take the shards' state out of the state dict of an ordinary optimizer; ValueError if it does not fit."""
        load_whole_state_dict(optimizer, self.flats, self.whole_parameters(optimizer), state_dict)

    def whole_parameters(self, optimizer):
        """The whole parameters to the shards in `optimizer`, in the order of its groups."""
        whole = {id(shard): parameter for parameter, shard in self.shards.items()}
        shards = [shard for group in optimizer.param_groups for shard in group["params"]]
        if not all(id(shard) in whole for shard in shards):
            raise ValueError(
                "the optimizer has other parameters; make it from parameters() of the wrapper, after wrapping"
            )
        return [whole[id(shard)] for shard in shards]

    @torch.no_grad()
    def restore(self):
        """Make the module an ordinary one again, whole on every rank; all ranks call this. Returns it."""
        self.begin("restore()")
        for block in self.blocks:
            self.request(block)()
        for handle in self.handles:
            handle.remove()
        self.handles = []
        return self.module

    def _apply(self, fn, recurse=True):
        raise RuntimeError("a sharded model cannot be moved or converted; do that before it is wrapped")

    def __reduce_ex__(self, protocol):
        raise TypeError("a sharded model cannot be copied or pickled; use its state_dict(), which all ranks call")


def recomputing():
    """Whether a forward pass runs inside a backward pass: activation checkpointing computes it again."""
    return backward_pass() != -1


def check_wrappable(module, named):
    """Raise ValueError if there is nothing to train, or the parameters are sharded or compiled already."""
    if any(isinstance(parameter, Sharded) or hasattr(parameter, "is_shard") for parameter in named.values()):
        raise ValueError("a part of the model is fully sharded already; name the parts as blocks of one wrapper")
    if any(type(each).__name__ == "OptimizedModule" or each._compiled_call_impl for each in module.modules()):
        raise ValueError("the model, or a part of it, is compiled already; wrap it first")
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError("the model has no trainable parameters: nothing to average, nothing to train")


def refuse(*_, **__):
    """Raise RuntimeError in place of adding a hook to a shard, of which autograd knows nothing."""
    raise RuntimeError("hooks on shards would never be called; add them to the model's parameters before wrapping")
