"""Stage 7: no rank keeps everything. Each keeps a shard, and asks the others for the rest when it needs it.

Training P float32 parameters with Adam takes 16 P bytes: 4 P of parameters, 4 P of gradients, 8 P of Adam's two
moments. Data parallelism keeps all of it on every rank. Lay the parameters end to end and cut them into K chunks;
after scatter-reduce, rank r owns chunk r+1 (stage 4), so let that chunk be its shard:

                            a rank's bytes        traffic of a step, each rank sends
    stages 3 to 6           16 P                  2 (K-1)/K p      scatter-reduce + allgather of gradients
    ShardedOptimizer        8 P + 8 P/K           3 (K-1)/K p      the same, then allgather of parameters
    FullyShardedData…       16 P/K + two blocks   3 (K-1)/K p      allgather twice, scatter-reduce once

Fully sharded, block by block, with the next block's allgather under this block's compute:

    compute         | forward 0 | forward 1 | forward 2 | backward 2 | backward 1 | backward 0 | update of the shard
    communication   | gather 1  | gather 2  | gather 2  | gather 1   | gather 0   | reduce 1   | reduce 0
                                                                     + reduce 2

Sources: Rajbhandari et al., ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023.
"""

from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils._pytree import tree_leaves

from .running import wire
from .stage3_paramserver import broadcast_parameters

WHOLE_TENSOR_OPTIMIZERS = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


class Flat:
    """Parameters of one dtype and device end to end in `full`, which is cut into K `chunks`; `mine` is this rank's.

    The parameters become views into `full`. `pieces[p]` is a pair of slices: the part of parameter p that lies in
    this rank's chunk, as a range of p's elements and as a range of the chunk. Parameters without such a part are
    left out.
    """

    def __init__(self, parameters, group=None):
        self.parameters, self.group = parameters, group
        self.shapes = [parameter.shape for parameter in parameters]
        self.lengths = {parameter: parameter.numel() for parameter in parameters}
        rank, world_size, _, _ = wire.neighbours(group)
        self.full = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.chunks = self.full.tensor_split(world_size)
        self.index = (rank + 1) % world_size
        for parameter, view in zip(parameters, self.views(self.full), strict=True):
            parameter.data = view
        self.pieces = self.cut()

    @property
    def mine(self):
        """The chunk of this rank; rank r's is chunk r+1."""
        return self.chunks[self.index]

    def views(self, flat):
        """The part of `flat` (as long as `full`) that belongs to each parameter, in the parameter's shape."""
        pieces = flat.split(list(self.lengths.values()))
        return [piece.view(shape) for shape, piece in zip(self.shapes, pieces, strict=True)]

    def cut(self):
        """Find the part of each parameter that lies in this rank's chunk."""
        low = sum(len(chunk) for chunk in self.chunks[: self.index])
        high = low + len(self.mine)
        ends = list(accumulate(parameter.numel() for parameter in self.parameters))
        pieces = {}
        for parameter, end in zip(self.parameters, ends, strict=True):
            start = end - parameter.numel()
            first, last = max(low, start), min(high, end)
            if first < last:
                pieces[parameter] = slice(first - start, last - start), slice(first - low, last - low)
        return pieces


def flats(parameters, group=None, kind=Flat):
    """Lay `parameters` out as one `Flat` for each dtype and device, the frozen ones by themselves."""
    alike = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(parameter)
    return [kind(members, group) for members in alike.values()]


@wire.collective
@torch.no_grad()
def gather_chunks(chunks, group=None):
    """Fill in the chunks of the other ranks; each rank sends (K-1)/K of the bytes in all `chunks`.

    As many messages and bytes as in stage 4's ring, but every owner sends its chunk to all others at once: there are
    many small blocks to gather, and nobody has to wait until a neighbour, who may be busy, has passed a chunk on.
    """
    rank, world_size, _, _ = wire.neighbours(group)
    others = [(other, wire.global_rank(other, group)) for other in range(world_size) if other != rank]
    mine = chunks[(rank + 1) % world_size]
    wire.exchange_all(
        [(mine, peer) for _, peer in others],
        [(chunks[(other + 1) % world_size], peer) for other, peer in others],
        group,
    )


@wire.collective
@torch.no_grad()
def sum_chunks(chunks, group=None):
    """Sum this rank's own chunk over the ranks, leave the others as they are. Same bytes as a gather.

    Every rank sends each chunk to its owner, who adds in the order of stage 4's ring: the same bits.
    """
    rank, world_size, _, _ = wire.neighbours(group)
    mine = chunks[(rank + 1) % world_size]
    parts = [torch.empty_like(mine) for _ in range(world_size - 1)]
    senders = [(rank + step) % world_size for step in range(1, world_size)]
    peers = [wire.global_rank(sender, group) for sender in senders]
    outgoing = [(chunks[(owner + 1) % world_size], peer) for owner, peer in zip(senders, peers, strict=True)]
    wire.exchange_all(outgoing, list(zip(parts, peers, strict=True)), group)
    for part in parts[1:]:
        parts[0] += part
    if parts:
        mine += parts[0]


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO-1: each rank updates its shard of the parameters, keeps optimizer state for this shard only, and shares it.

    `params` as for any optimizer, groups too; `optimizer_cls(**kwargs)` must work element by element, as SGD, Adam
    and AdamW do: then results equal those of the unsharded optimizer bit for bit. Gradients must already be averaged.
    Learning rate schedulers see one optimizer. Raises ValueError for an optimizer that looks at whole tensors.
    """

    def __init__(self, params, optimizer_cls, group=None, **kwargs):
        name = getattr(optimizer_cls, "func", optimizer_cls).__name__  # a functools.partial has the class in `func`
        if name in WHOLE_TENSOR_OPTIMIZERS:
            raise ValueError(f"{name} looks at whole tensors, so it cannot work on shards; try AdamW")
        super().__init__(params, kwargs)
        self.group = group
        self.flats = flats([parameter for members in self.param_groups for parameter in members["params"]], group)
        self.shards = {
            parameter: torch.nn.Parameter(flat.mine[inside], requires_grad=False)
            for flat in self.flats
            for parameter, (_, inside) in flat.pieces.items()
        }
        self.local = optimizer_cls(self.local_groups(), **kwargs)
        self.defaults = self.local.defaults
        for group_, local in zip(self.param_groups, self.local.param_groups, strict=True):
            group_.update({key: value for key, value in local.items() if key != "params"})

    def local_groups(self):
        """The parameter groups with this rank's shards in place of the parameters."""
        return [
            {**members, "params": [self.shards[p] for p in members["params"] if p in self.shards]}
            for members in self.param_groups
        ]

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's shard, then gather everyone's: each rank sends (K-1)/K of the parameters' bytes."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for members, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local.update({key: value for key, value in members.items() if key != "params"})
        for flat in self.flats:
            for parameter, (outside, _) in flat.pieces.items():
                gradient = parameter.grad
                self.shards[parameter].grad = None if gradient is None else gradient.reshape(-1)[outside]
        self.local.step()
        for flat in self.flats:
            gather_chunks(flat.chunks, group=self.group)
        return loss

    def state_dict(self):
        """Return the state dict of the unsharded optimizer, the same on every rank; all ranks must call this."""
        index = {parameter: number for number, parameter in enumerate(self.parameters())}
        state = gathered_state(self.flats, {p: self.local.state.get(shard, {}) for p, shard in self.shards.items()})
        numbered = {index[parameter]: entries for parameter, entries in state.items() if entries}
        groups = [
            {**members, "params": [index[parameter] for parameter in members["params"]]}
            for members in self.param_groups
        ]
        return {"state": dict(sorted(numbered.items())), "param_groups": groups}

    def load_state_dict(self, state_dict):
        """Take this rank's shards out of the state dict of an unsharded optimizer, or of any number of ranks."""
        parameters = self.parameters()
        if [len(m["params"]) for m in state_dict["param_groups"]] != [len(m["params"]) for m in self.param_groups]:
            raise ValueError("the state dict has other parameter groups than this optimizer")
        for members, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            members.update({key: value for key, value in saved.items() if key != "params"})
        self.local.state.clear()
        self.local.state.update(
            (self.shards[parameters[number]], piece)
            for number, entries in state_dict["state"].items()
            for piece in local_state(self.flats, parameters[number], entries)
        )

    def parameters(self):
        """All parameters in the order of their groups."""
        return [parameter for members in self.param_groups for parameter in members["params"]]


@torch.no_grad()
def gathered_state(flats, states):
    """Return {parameter: {key: value}} with whole tensors, all ranks alike, from `states` of this rank's pieces.

    A tensor as long as its piece is gathered; anything else, such as Adam's step count, is the same on all ranks.
    """
    gathered = {}
    for flat in flats:
        known = known_state(flat, states)
        for number, entries in sorted(known.items()):
            gathered[flat.parameters[number]] = dict(entries)
        for key in sorted({key for entries in known.values() for key in entries}):
            dtypes = [entries[key] for entries in known.values() if isinstance(entries.get(key), torch.dtype)]
            if dtypes:
                whole = gathered_entry(flat, states, key, dtypes[0])
                for number, entries in known.items():
                    if isinstance(entries.get(key), torch.dtype):
                        gathered[flat.parameters[number]][key] = whole[number].clone()
    return gathered


def known_state(flat, states):
    """What any rank knows of the state: {parameter's number: {key: value, or the dtype of a tensor in pieces}}."""
    mine = {}
    for number, parameter in enumerate(flat.parameters):
        if parameter in flat.pieces and states.get(parameter):
            length = (flat.pieces[parameter][0].stop - flat.pieces[parameter][0].start,)
            mine[number] = {
                key: value.dtype if isinstance(value, torch.Tensor) and value.shape == length else value
                for key, value in states[parameter].items()
            }
    everyone = [None] * len(flat.chunks)
    dist.all_gather_object(everyone, mine, group=flat.group)
    return {number: entries for one in everyone for number, entries in one.items()}


def gathered_entry(flat, states, key, dtype):
    """Gather the tensors called `key` of all pieces; return whole ones, a view for each parameter of `flat`."""
    whole = torch.zeros(sum(map(len, flat.chunks)), dtype=dtype, device=flat.chunks[0].device)
    chunks = whole.tensor_split(len(flat.chunks))
    for parameter, (_, inside) in flat.pieces.items():
        if key in states.get(parameter, {}):
            chunks[flat.index][inside] = states[parameter][key]
    gather_chunks(chunks, group=flat.group)
    return flat.views(whole)


def local_state(flats, parameter, entries):
    """Yield this rank's piece of the optimizer state `entries` of a whole parameter; nothing if it has no piece."""
    for flat in flats:
        if parameter in flat.pieces:
            outside, _ = flat.pieces[parameter]
            yield {
                key: value.reshape(-1)[outside].to(parameter.device, copy=True)
                if isinstance(value, torch.Tensor) and value.numel() == flat.lengths[parameter] and key != "step"
                else deepcopy(value)
                for key, value in entries.items()
            }


class FreeableFlat(Flat):
    """A `Flat` that exists whole only between `gather` and `free`; in between, only `shard`, a copy of `mine`, stays.

    `shards[p]` is the part of parameter p that this rank keeps and updates. Memory is freed by resizing the storage
    to nothing, so that the tensors which autograd keeps for backward come back to life with the next `gather`.
    """

    def __init__(self, parameters, group=None):
        super().__init__(parameters, group)
        self.whole = self.views(self.full)
        self.shard, self.bytes = self.mine.clone(), self.full.untyped_storage().nbytes()
        self.shards = {
            parameter: torch.nn.Parameter(self.shard[inside], requires_grad=parameter.requires_grad)
            for parameter, (_, inside) in self.pieces.items()
        }
        self.gradient, self.places = None, {}
        self.free()

    def gather(self):
        """Bring the whole parameters into being; this rank sends (K-1)/K of their bytes."""
        self.full.untyped_storage().resize_(self.bytes)
        for parameter, view in zip(self.parameters, self.whole, strict=True):
            parameter.data = view
        self.mine.copy_(self.shard)
        gather_chunks(self.chunks, group=self.group)

    def free(self):
        """Let go of the whole parameters; whoever looks at one now finds it empty, not memory that is gone."""
        for parameter in self.parameters:
            parameter.data = self.full.new_empty(0)
        self.full.untyped_storage().resize_(0)

    def collect(self):
        """Make room for the gradients, the views of one message. Returns the parameters."""
        self.gradient = torch.empty_like(self.full)
        self.places = dict(zip(self.parameters, self.views(self.gradient), strict=True))
        return self.parameters

    def take(self, parameter):
        """Move a finished gradient over to its place, divided by K on the way, as in stage 6."""
        torch.mul(parameter.grad.to_dense(), 1 / len(self.chunks), out=self.places.pop(parameter))
        parameter.grad = None

    def reduce(self):
        """Average the gradients, keep this rank's chunk in the shards' `.grad`, let go of the rest."""
        for untouched in self.places.values():
            untouched.zero_()
        chunks = self.gradient.tensor_split(len(self.chunks))
        sum_chunks(chunks, group=self.group)
        mine = chunks[self.index].clone()
        for parameter, (_, inside) in self.pieces.items():
            shard = self.shards[parameter]
            shard.grad = mine[inside] if shard.grad is None else shard.grad.add_(mine[inside])
        self.gradient, self.places = None, {}


class Block:
    """A module whose parameters are gathered and freed together. `following` has the block after it in each phase.

    `missing` are the parameters whose gradients are not complete yet; None outside of the backward pass.
    """

    def __init__(self, module, parameters, group):
        self.module, self.following = module, {}
        self.flats = flats(parameters, group, FreeableFlat)
        self.trainable = [flat for flat in self.flats if flat.parameters[0].requires_grad]
        self.flat_of = {parameter: flat for flat in self.trainable for parameter in flat.parameters}
        self.gathering = self.missing = None

    def gather(self):
        """Gather all parameters (in the communication thread)."""
        for flat in self.flats:
            flat.gather()

    def reduce(self):
        """Average all gradients and free the parameters that they belong to (in the communication thread)."""
        for flat in self.trainable:
            flat.free()
            flat.reduce()

    def free(self):
        """Let go of the parameters, whether they are here or still on their way."""
        if self.gathering is not None:
            wait([self.gathering])
            self.gathering = None
            for flat in self.flats:
                flat.free()


class FullyShardedDataParallel(torch.nn.Module):
    """ZeRO-3: parameters, gradients and optimizer state in shards; a block is whole only while it computes.

    `blocks`: the submodules to gather one at a time, by default the members of every outermost Sequential or
    ModuleList; what is in none of them forms one more block. Every rank must run the same blocks in the same order.
    `parameters()` are this rank's shards: make the optimizer (any that works element by element) from them, after
    wrapping. `state_dict()` is the ordinary one of the whole model; all ranks must call it. Raises ValueError if
    nothing is trainable.
    """

    def __init__(self, module, blocks=None, process_group=None, prefetch=True):
        super().__init__()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("the model has no trainable parameters: nothing to average, nothing to train")
        broadcast_parameters(module, group=process_group)
        self.module, self.prefetch, self.names = module, prefetch, list(module.state_dict())
        self.homes = homes(module)
        members = assign_blocks(module, default_blocks(module) if blocks is None else blocks)
        for owner, name, _ in (home for places in self.homes.values() for home in places):
            owner.__dict__[name] = owner._parameters.pop(name)  # still an attribute, no longer registered
        self.blocks = [Block(*member, process_group) for member in members]
        self.flats = [flat for block in self.blocks for flat in block.flats]
        self.shards = {parameter: shard for flat in self.flats for parameter, shard in flat.shards.items()}
        self.communication = ThreadPoolExecutor(1, "communication")  # one thread: first in, first out
        self.latest, self.reducing, self.in_backward = None, [], False
        self.handles = [handle for block in self.blocks for handle in self.watch(block)]

    def watch(self, block):
        """Register the hooks that gather, free and reduce `block` at the right moments."""
        yield block.module.register_forward_pre_hook(lambda *_: self.enter(block, "forward"))
        yield block.module.register_forward_hook(lambda module, inputs, outputs: self.leave(block, outputs))
        for parameter in block.flat_of:
            yield parameter.register_post_accumulate_grad_hook(lambda ready: self.gradient_ready(block, ready))

    def forward(self, *args, **kwargs):
        """What the module returns; its blocks are gathered one after the other."""
        self.latest, self.in_backward = None, False
        outputs = self.module(*args, **kwargs)
        self.free_all()  # a block that was fetched ahead in vain
        return outputs

    def enter(self, block, phase):
        """Have `block` whole before it computes, and start to gather the block that came after it last time."""
        if self.latest is not None:
            self.latest.following[phase] = block
        self.latest = block
        self.request(block)
        with wire.span("wait"):
            block.gathering.result()
        if self.prefetch and phase in block.following:
            self.request(block.following[phase])

    def request(self, block):
        """Start to gather `block` unless it is here or on its way."""
        if block.gathering is None:
            block.gathering = self.communication.submit(torch.no_grad()(block.gather))

    def leave(self, block, outputs):
        """Free the block after its forward pass, and be told when backward reaches its outputs."""
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.before_backward(block))
        block.free()

    def before_backward(self, block):
        """Gather the block again, and make room for its gradients."""
        if not self.in_backward:
            self.latest, self.in_backward = None, True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # when this pass ends
        if block.missing is None:
            self.enter(block, "backward")
            block.missing = {parameter for flat in block.trainable for parameter in flat.collect()}

    def gradient_ready(self, block, parameter):
        """The hook: once the last gradient of the block is complete, average them while backward goes on."""
        block.flat_of[parameter].take(parameter)
        block.missing.discard(parameter)
        if not block.missing:
            self.reducing.append(self.communication.submit(block.reduce))

    def finish(self):
        """Before `backward()` returns: gradients of parameters that took no part are zero; wait for all blocks."""
        for block in self.blocks:
            if block.missing:
                self.reducing.append(self.communication.submit(block.reduce))
            block.missing = None
        reducing, self.reducing, self.in_backward = self.reducing, [], False
        with wire.span("wait"):
            wait(reducing)
        self.free_all()
        for reduced in reducing:
            reduced.result()

    def free_all(self):
        """Let go of every block that is still whole."""
        for block in self.blocks:
            block.free()

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """This rank's shards under the names of the parameters they are part of; the other parameters are left out."""
        for parameter, places in self.homes.items():
            if parameter in self.shards:
                yield prefix + places[0][2], self.shards[parameter]

    @torch.no_grad()
    def state_dict(self):
        """Return the state dict of the whole model, copies on the CPU; gathered block by block, all ranks alike."""
        state = {name: buffer.detach().cpu().clone() for name, buffer in self.module.state_dict().items()}
        for block in self.blocks:
            self.request(block)
            block.gathering.result()
            for parameter in (parameter for flat in block.flats for parameter in flat.parameters):
                whole = parameter.detach().cpu().clone()
                state.update((name, whole) for _, _, name in self.homes[parameter])
            block.free()
        return {name: state[name] for name in self.names}

    @torch.no_grad()
    def load_state_dict(self, state):
        """Take this rank's shards out of the state dict of a whole model; KeyError for a missing name."""
        for flat in self.flats:
            for parameter, (outside, _) in flat.pieces.items():
                flat.shards[parameter].copy_(state[self.homes[parameter][0][2]].reshape(-1)[outside])
        self.module.load_state_dict({name: state[name] for name in self.module.state_dict()})

    def optimizer_state_dict(self, optimizer):
        """Return the state dict of an optimizer of `parameters()` as if nothing were sharded; all ranks call this."""
        state = gathered_state(self.flats, {p: optimizer.state.get(shard, {}) for p, shard in self.shards.items()})
        members = self.members(optimizer)
        order = [parameter for group in members for parameter in group]
        groups, start = [], 0
        for group, parameters in zip(optimizer.param_groups, members, strict=True):
            groups.append({**group, "params": list(range(start, start + len(parameters)))})
            start += len(parameters)
        return {"state": {n: state[p] for n, p in enumerate(order) if state.get(p)}, "param_groups": groups}

    def load_optimizer_state_dict(self, optimizer, state_dict):
        """Take the shards' state out of the state dict of an ordinary optimizer; all ranks call this."""
        order = [parameter for group in self.members(optimizer) for parameter in group]
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        optimizer.state.clear()
        for number, entries in state_dict["state"].items():
            for piece in local_state(self.flats, order[number], entries):
                optimizer.state[self.shards[order[number]]] = piece

    def members(self, optimizer):
        """The whole parameters of each group of `optimizer`, in order, also those without a shard on this rank."""
        number = {id(self.shards[p]): n for n, p in enumerate(self.homes) if p in self.shards}
        mine = [{number[id(shard)] for shard in group["params"]} for group in optimizer.param_groups]
        everyone = [None] * len(self.flats[0].chunks)
        dist.all_gather_object(everyone, mine, group=self.flats[0].group)
        order = list(self.homes)
        return [[order[n] for n in sorted(set().union(*group))] for group in zip(*everyone, strict=True)]

    def restore(self):
        """Make the module an ordinary one again, whole on every rank; all ranks call this. Returns it."""
        whole = self.state_dict()
        for handle in self.handles:
            handle.remove()
        for parameter, places in self.homes.items():
            parameter.data = whole[places[0][2]].to(parameter.device)
            for owner, name, _ in places:
                owner._parameters[name] = owner.__dict__.pop(name)
        return self.module


def homes(module):
    """Return {parameter: [(module it is in, its name there, its full name), …]}; a shared one has several homes."""
    places = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((owner, name, f"{path}.{name}" if path else name))
    return places


def default_blocks(module):
    """The members of every outermost Sequential or ModuleList in `module`, which may be one itself."""
    if isinstance(module, torch.nn.Sequential | torch.nn.ModuleList):
        return [child for child in module if any(True for _ in child.parameters())]
    return [block for child in module.children() for block in default_blocks(child)]


def assign_blocks(module, blocks):
    """Return (block, its parameters) pairs; parameters of no block or of several go to `module` as a whole."""
    inside = list(module.modules())
    if not all(any(block is one for one in inside) for block in blocks):
        raise ValueError("every block must be a submodule of the model")
    owners = {}
    for block in blocks:
        for parameter in block.parameters():
            owners.setdefault(parameter, []).append(block)
    alone = {parameter: owner[0] for parameter, owner in owners.items() if len(owner) == 1}
    members = [(block, [p for p in block.parameters() if alone.get(p) is block]) for block in blocks]
    rest = [parameter for parameter in module.parameters() if parameter not in alone]
    return [(block, parameters) for block, parameters in [(module, rest), *members] if parameters]


def train(model, batches, lr):
    """Train `model` in place on this rank's share of each batch; return this rank's loss of every step."""
    parallel = FullyShardedDataParallel(model)
    optimizer = SGD(parallel.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parallel.restore()
    return losses
