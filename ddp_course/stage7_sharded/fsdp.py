"""ZeRO-3: hooks by which each block is whole while it computes, and the next is on its way.

On CUDA only streams wait, and the processor is far ahead of them. So only the training thread
allocates and frees memory, and a message waits for the work that was queued before its memory was
allocated. However far ahead the processor is, at most two blocks are whole, and the gradients of at
most two blocks take memory.
"""

from contextlib import suppress

import torch

from manyranks import flight_recorder
from manyranks.torch_inside import after_backward, backward_pass, tensors_in

from .. import communication, wire
from ..base.torch_private import uncompiled
from ..stage3_paramserver import broadcast_parameters
from ..stage6_ddp.buffers import broadcast_tensors
from .blocks import Block, assign_blocks, default_blocks, holders_of
from .clipping import clip_grad_norm_
from .flat import (
    Shard,
    load_whole_state_dict,
    used_on_any_rank,
    wait_for_all_ranks,
    whole_state,
)
from .parts import refuse_with
from .shardable import check_model


class FullyShardedDataParallel(torch.nn.Module):
    """ZeRO-3: everything is in shards, and each block is whole only while it computes.

    `blocks` are the submodules to gather one at a time, each of one dtype, by default the members
    of every outermost Sequential or ModuleList; parameters in none of them form one more block.
    Every rank must run the same blocks in the same order. `parameters()` are this rank's shards:
    make an optimizer that works element by element from them, after wrapping. Raises ValueError if
    nothing is trainable, or if something is sharded already.
    """

    load_state_dict = _load_from_state_dict = refuse_with(
        "load a state dict into the model before it is wrapped, or after restore()"
    )
    refuse_average = Shard.refuse_average
    _apply = refuse_with(
        "a sharded model cannot be moved or converted; do that before it is wrapped"
    )
    __reduce_ex__ = refuse_with(
        "a sharded model cannot be copied or pickled; use its state_dict(), which all ranks call"
    )

    def __init__(self, module, blocks=None, process_group=None, prefetch=True):
        super().__init__()
        check_model(module, process_group)
        broadcast_parameters(module, group=process_group)
        self.module = module
        self.group = process_group
        self.prefetch = prefetch
        self.thread = communication.communication_thread(process_group)
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.shard(default_blocks(module) if blocks is None else blocks)
        self.latest = None
        self.reducing = []
        self.used = set()  # the parameters that have got a gradient in this pass
        self.backward_pass = None
        self.passes = 0
        self.handles = [handle for block in self.blocks for handle in self.add_hooks(block)]
        for layer in module.modules():
            self.handles.append(layer.register_state_dict_pre_hook(refuse_parts))
        self.free_all()

    def shard(self, blocks):
        """Cut the parameters of each block, and of the rest of the model, into shards."""
        holders = holders_of(self.module)
        members = assign_blocks(self.module, blocks)
        self.blocks = [
            Block(number, *member, self.group, holders) for number, member in enumerate(members)
        ]
        self.device = self.blocks[0].full.device
        self.shards = {}
        for block in self.blocks:
            self.shards.update(block.shards)
        # torch's DistributedDataParallel around this finds nothing to do.
        self._ddp_params_and_buffers_to_ignore = [f"module.{name}" for name in self.names.values()]

    def add_hooks(self, block):
        """Yield the handles of the hooks that gather, free and reduce `block`, as they are added.

        The first hook runs before the block's `forward`, the second one after it.
        """
        yield block.module.register_forward_pre_hook(
            lambda *_: self.before_forward(block), prepend=True
        )
        yield block.module.register_forward_hook(
            lambda module, inputs, outputs: self.after_forward(block, outputs)
        )
        for parameter in block.parameters:
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(
                    lambda ready: self.gradient_ready(block, ready)
                )

    @uncompiled
    def forward(self, *args, **kwargs):
        """Return the module's outputs; its blocks are gathered one after the other."""
        if backward_pass() != -1:
            return self.module(*args, **kwargs)
        self.check_usable()
        # Rank 0 may try to evaluate alone.
        if not (self.training and torch.is_grad_enabled()):
            wait_for_all_ranks("a forward pass of a sharded model", self.group)
        # The pass before may have ended with an exception.
        self.start_over()
        self.passes += 1
        outputs = self.module(*args, **kwargs)
        # A block may have been gathered ahead and not used.
        self.free_all()
        return outputs

    def check_usable(self):
        """Raise RuntimeError after `restore`, or if parameters have changed since wrapping."""
        if not self.handles:
            raise RuntimeError(
                "restore() has made the module an ordinary one again; use that, or wrap it anew"
            )
        # After a pass that failed some parameters may be whole.
        present = dict(self.module.named_parameters())
        known = {*self.shards, *self.shards.values()}
        others = [name for name, parameter in present.items() if parameter not in known]
        others += self.names.values() - present.keys()
        if others or len(present) != len(self.shards):
            raise RuntimeError(
                "layers or parameters were exchanged, added or removed after wrapping:"
                f" {', '.join(others)}. Change and load the model before it is wrapped, or after"
                " restore()"
            )
        for parameter, shard in self.shards.items():
            if parameter.requires_grad != shard.requires_grad:
                raise RuntimeError(
                    f"requires_grad of {self.names[parameter]} was changed after wrapping; freeze"
                    " parameters before"
                )

    def start_over(self):
        """Wait for messages on their way, and drop gradients and blocks that a failed pass left."""
        reducing = self.reducing
        self.reducing = []
        self.used = set()
        self.backward_pass = None
        self.latest = None
        for wait in reducing:
            # The communication thread raises the error again in its next job.
            with suppress(Exception):
                wait()
        for block in self.blocks:
            block.drop_gradients()
        self.free_all()

    def before_forward(self, block):
        """Have `block` whole, also where activation checkpointing runs it again in backward."""
        if backward_pass() == -1:
            self.enter(block, "forward")
        else:
            self.request(block)()

    def enter(self, block, phase):
        """Have `block` whole before it computes, and start to gather the one that followed it."""
        if self.latest is not None:
            self.latest.following[phase] = block
        self.latest = block
        wait = self.request(block)
        with wire.span("wait"):
            wait()
        if self.prefetch and phase in block.following:
            self.request(block.following[phase])

    def request(self, block):
        """Return a function that waits for `block`, which is gathered from now on."""
        if block.gathering is None:
            block.make_room()
            block.gathering = self.start("gather", block, block.gather)
        return block.gathering

    def start(self, what, block, collective):
        """Queue a collective for the communication thread, named by its block and pass."""
        phase = "forward" if self.backward_pass is None else "backward"
        name = f"{what} of block {block.number}, {phase} {self.passes},"

        def recorded(group):
            with flight_recorder.entry(name, block.full, group):
                return collective(group)

        return self.thread.start(recorded, self.device)

    def after_forward(self, block, outputs):
        """Free the block after its forward pass, and put a hook on its outputs for backward.

        Raises RuntimeError for outputs in which no tensor is found.
        """
        version = block.shard._version
        found = tensors_in(outputs)
        if not found and torch.is_grad_enabled():
            raise RuntimeError(
                f"the block {type(block.module).__name__} returns a {type(outputs).__name__} in"
                " which no tensor is found, so nothing would gather it again in backward: let a"
                " block return tensors, in lists, tuples, dicts or dataclasses, or name other"
                " `blocks`"
            )
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.before_backward(block, version))
        if backward_pass() == -1:
            block.free()

    def before_backward(self, block, version):
        """Gather the block again, as it was in forward, and make room for its gradients.

        Raises RuntimeError for create_graph=True, for a backward pass inside another or after one
        that failed, and for weights that have changed since the forward pass.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True would need the whole parameters after backward; stage 6 keeps"
                " them"
            )
        if self.backward_pass is None:
            self.latest = None
            self.backward_pass = backward_pass()
            after_backward(self.finish)
        if self.backward_pass != backward_pass():
            raise RuntimeError(
                "a backward pass began before another had ended: that one failed, and forward()"
                " must come first; or this one is inside it (activation checkpointing: set"
                " use_reentrant=False)"
            )
        if block.places is None:
            if block.shard._version != version:
                raise RuntimeError(
                    "the parameters have changed since the forward pass; call backward() before"
                    " step()"
                )
            self.enter(block, "backward")
            while communication.is_queued(self.device) and len(self.reducing) > 1:
                # The stream waits for this average, so its message can be freed.
                self.reducing.pop(0)()
            block.make_room_for_gradients()

    def gradient_ready(self, block, parameter):
        """Take in a gradient, and average those of a block once the last one is complete.

        This is a hook, and backward goes on meanwhile. Raises RuntimeError if the gradient came,
        but not by way of its block's outputs.
        """
        if block.places is None:
            raise RuntimeError(
                f"{self.names[parameter]} got a gradient, but not by way of what its block returned"
            )
        self.used.add(parameter)
        block.put_gradient(parameter)
        if not block.places:
            self.reduce(block)

    def reduce(self, block):
        """Start to average the gradients of `block`, and free it unless parameters are frozen."""
        if all(parameter.requires_grad for parameter in block.parameters):
            block.free()
        self.reducing.append(self.start("average", block, block.average))

    def finish(self):
        """Average blocks of which some parameters took no part, and wait for all averages.

        This runs before `backward()` returns.
        """
        for block in self.blocks:
            if block.places:
                self.reduce(block)
        with wire.span("wait"):
            for wait in self.reducing:
                wait()
            used = used_on_any_rank(self.shards, self.used, self.device, self.group)
        for block in self.blocks:
            if block.averages is not None:
                block.hand_out_averages(used)
        self.start_over()

    def free_all(self):
        """Free every block that is still whole."""
        for block in self.blocks:
            block.free()

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale all ranks' gradients to a norm of at most `max_norm`; return the norm before.

        All ranks call this.
        """
        return clip_grad_norm_(self.shards.values(), max_norm, norm_type, self.group, self.device)

    def prepare_to_gather(self, what):
        """Wait for all ranks and messages, and broadcast rank 0's buffers, before gathering all."""
        self.check_usable()
        wait_for_all_ranks(f"{what} of a sharded model", self.group)
        self.start_over()
        broadcast_tensors(list(self.module.buffers()), 0, self.group)

    @torch.no_grad()
    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        """Return the state dict of the whole model, on the CPU, with rank 0's buffers.

        All ranks must call this. If this is a part of another module, that one passes `destination`
        and `prefix`.
        """
        self.prepare_to_gather("state_dict()")
        whole = {}
        for block in self.blocks:
            self.request(block)()
            for parameter, shard in block.shards.items():
                whole[shard] = parameter.detach().to("cpu", copy=True)
            block.free()
        state = {} if destination is None else destination
        for name, value in self.module.state_dict(prefix=prefix, keep_vars=True).items():
            if isinstance(value, Shard):
                state[name] = whole[value]
            elif isinstance(value, torch.Tensor):
                state[name] = value.to("cpu", copy=True)
            else:
                state[name] = value
        return state

    def optimizer_state_dict(self, optimizer):
        """Return the state dict of an optimizer of `parameters()` as if nothing were sharded.

        All ranks call this.
        """
        return {**optimizer.state_dict(), "state": whole_state(optimizer, self.blocks, self.group)}

    def load_optimizer_state_dict(self, optimizer, state_dict):
        """Take the shards' state out of an ordinary optimizer's state dict.

        Raises torch's errors if the state dict does not fit.
        """
        load_whole_state_dict(optimizer, self.blocks, state_dict)

    @torch.no_grad()
    def restore(self):
        """Return the module, ordinary again and whole on every rank; all ranks call this."""
        self.prepare_to_gather("restore()")
        for block in self.blocks:
            self.request(block)()
        for handle in self.handles:
            handle.remove()
        self.handles = []
        return self.module


def refuse_parts(module, prefix, keep_vars):
    """Raise RuntimeError in place of a state dict with this rank's shards; this is a hook.

    With `keep_vars` the tensors themselves are wanted, and nothing is raised.
    """
    if not keep_vars:
        raise RuntimeError("the model is sharded; call state_dict() of its wrapper, on all ranks")
