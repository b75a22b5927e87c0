"""Tensors that say they are on "cuda:1", while the processor computes them in order."""

import functools
import threading
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map

from . import memory
from .memory import Block, Use
from .streams import (
    LOCK,
    current,
    host_waits,
    index_of,
    merge,
    open_context,
    place,
    queue_work,
    visible,
)

A = torch.ops.aten
TWO_DEVICES = {A.copy_.default, A._to_copy.default, A._copy_from.default}  # these may have two
HOST_WAITS = {  # these need the values on the host
    A._local_scalar_dense.default,
    A.equal.default,
    A.nonzero.default,
    A.masked_select.default,
    A.is_nonzero.default,
}
loading = threading.local()  # `device`, where `torch.load` shall put tensors
generators = {}  # this maps a GPU to the state of its random generator
hooks = {"collective": None, "functional": None}  # nccl.py puts its functions here


class PretendTensor(torch.Tensor):
    """A tensor on a pretended GPU; `raw` has the values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw, index):
        """Return a shell of the shape of `raw`."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("cuda", index),
        )

    def __init__(self, raw, index):
        self.raw = raw
        self.gpu = index
        storage = raw.untyped_storage()
        self.block = memory.blocks.get(storage._cdata)
        if self.block is None:
            self.block = Block(index, storage)
            memory.blocks[storage._cdata] = self.block

    def __repr__(self, **_):
        return repr(self.detach().cpu())[:-1] + f", device='{self.device}')"

    def span(self):
        """Return the first byte, and the one after the last."""
        raw = self.raw
        start = raw.data_ptr()
        if not raw.numel():
            return start, start
        steps = sum((n - 1) * step for n, step in zip(raw.shape, raw.stride(), strict=True))
        return start, start + (steps + 1) * raw.itemsize

    def use(self, key, clock, writes, where):
        """Note that work on a stream uses these bytes."""
        if self.raw.numel():
            self.block.use(Use(key, clock[key], writes, *self.span(), where), clock)

    def unfinished(self):
        """Return the messages that are still on their way from or into these bytes."""
        start, end = self.span()
        return [one for one in self.block.messages if one.start < end and start < one.end]

    def settle(self):
        """Wait for messages in these bytes: on a GPU the stream would."""
        for message in self.unfinished():
            message.finish()
            with LOCK:
                self.block.messages = [one for one in self.block.messages if one is not message]

    def as_subclass(self, kind):
        """Return the same tensor: what a subclass forbids is tested without GPUs."""
        return self

    @property
    def __class__(self):
        """What it is."""
        return type(self)

    @__class__.setter
    def __class__(self, kind):
        """It becomes one of that kind, and stays on its GPU."""
        if kind is torch.nn.Parameter:
            kind = PretendTensor
        elif not issubclass(kind, PretendTensor):
            kind = both(kind)
        object.__dict__["__class__"].__set__(self, kind)

    def record_stream(self, stream):
        """Keep the memory, when it is freed, until this stream is done."""
        self.block.recorded.add(stream.key)

    def data_ptr(self):
        """Return the address of the values."""
        return self.raw.data_ptr()

    def untyped_storage(self):
        """Return the values' storage."""
        return self.raw.untyped_storage()

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        copy = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        else:
            copy.requires_grad_(self.requires_grad)
            if self.grad is not None:
                copy.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol):
        self.settle()
        return rebuild, (self.raw, self.gpu, self.requires_grad)

    @property
    def data(self):
        """The same values without gradients."""
        return self.detach()

    @data.setter
    def data(self, other):
        torch.Tensor.data.__set__(self, other)  # torch exchanges the shell only
        self.raw = other.raw
        self.gpu = other.gpu
        self.block = other.block

    def tolist(self):
        """Return the values, for which the host waits."""
        return self.cpu().tolist()

    def numpy(self, *_, **__):
        """Refused, as on CUDA."""
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Carry out an operation: each one with such a tensor comes here."""
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return hooks["collective"](func, args, kwargs)
        if func.namespace == "_c10d_functional":
            return hooks["functional"](func, args, kwargs)
        if not facts_of(func).view:
            for value in (*args, *kwargs.values()):
                for tensor in tensors_in(value):
                    if isinstance(tensor, PretendTensor) and tensor.block.messages:
                        tensor.settle()  # never with the lock, which others may need to get there
        with LOCK:
            return run(func, args, kwargs)


@functools.cache
def both(kind):
    """Return a class of tensors on a pretended GPU that are of this kind, too."""
    form = {"__torch_function__": torch._C._disabled_torch_function_impl}
    return type(kind.__name__, (PretendTensor, kind), form)


def rebuild(raw, index, requires_grad):
    """Return the tensor that was pickled: on its GPU, or where `torch.load` was told to put it."""
    place_for = getattr(loading, "device", None)
    if place_for is not None:
        index = None if place_for.type == "cpu" else index_of(place_for)
    if index is None:
        return raw.requires_grad_(requires_grad)
    return PretendTensor(raw, index).requires_grad_(requires_grad)


def load_by(original):
    """`torch.load` with a `map_location` that is a device or its name."""

    @functools.wraps(original)
    def load(file, map_location=None, **options):
        named = isinstance(map_location, (str, torch.device))
        loading.device = torch.device(map_location) if named else None
        try:
            return original(file, "cpu" if named else map_location, **options)
        finally:
            loading.device = None

    return load


class Facts:
    """What the schema of an operation says of it.

    It says which arguments are written, and whether the operation only returns a view.
    """

    def __init__(self, func):
        schema = func._schema
        self.written = [bool(a.alias_info and a.alias_info.is_write) for a in schema.arguments]
        self.written_names = {
            a.name for a, writes in zip(schema.arguments, self.written, strict=True) if writes
        }
        self.view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.empty = "empty" in schema.name
        self.name = schema.name


_facts = {}


def facts_of(func):
    """Return the facts of an operation."""
    if func not in _facts:
        _facts[func] = Facts(func)
    return _facts[func]


def tensors_in(value):
    """Yield all tensors in an argument."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def bare(value):
    """Return the values of a tensor."""
    return value.raw if isinstance(value, PretendTensor) else value


class Argument(NamedTuple):
    """A tensor among the arguments of an operation, and whether the operation writes it."""

    tensor: torch.Tensor
    writes: bool


def arguments_of(facts, args, kwargs):
    """Return an Argument for each tensor among the arguments of an operation."""
    found = []
    for value, writes in zip(args, facts.written, strict=False):
        found += [Argument(tensor, writes) for tensor in tensors_in(value)]
    for name, value in kwargs.items():
        writes = name in facts.written_names
        found += [Argument(tensor, writes) for tensor in tensors_in(value)]
    return found


def check_devices(facts, gpus, others):
    """Refuse tensors on two devices; numbers and indices may be on the CPU."""
    foreign = [tensor for tensor in others if tensor.dim() and "index" not in facts.name]
    if len(gpus) > 1 or (gpus and foreign):
        found = [f"cuda:{gpu}" for gpu in sorted(gpus)]
        if foreign:
            found.append("cpu")
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{found[0]} and {found[1]}! ({facts.name} at {place()})"
        )


def run(func, args, kwargs, index=None):
    """Run one operation on the processor; note what it reads, writes and makes, on which stream."""
    facts = facts_of(func)
    arguments = arguments_of(facts, args, kwargs)
    pretended = [each for each in arguments if isinstance(each.tensor, PretendTensor)]
    others = [each.tensor for each in arguments if not isinstance(each.tensor, PretendTensor)]
    gpus = dict.fromkeys(argument.tensor.gpu for argument in pretended)
    if func not in TWO_DEVICES:
        check_devices(facts, gpus, others)
    to_cpu, index, kwargs = target(gpus, kwargs, index)
    key = current(open_context(index))
    where = place()
    clock = queue_with(key, gpus)
    if not facts.view:
        for argument in pretended:
            argument.tensor.use(key, clock, argument.writes, where)
    to_host = func is A.copy_.default and not isinstance(args[0], PretendTensor)
    if func in HOST_WAITS or to_cpu or to_host:
        host_waits(clock, facts.name.removeprefix("aten::"))
    result = with_generator(facts.random, index, func, args, kwargs)
    if to_cpu:
        return result
    given = {id(bare(each.tensor)): each.tensor for each in arguments}

    def dress(value):
        if not isinstance(value, torch.Tensor):
            return value
        # An operation may return an argument, which is then the same tensor, and no new one.
        if id(value) in given:
            return given[id(value)]
        new = PretendTensor(value, index)
        if not facts.view and not facts.empty:
            new.use(key, clock, True, where)
        return new

    return tree_map(dress, result)


class Target(NamedTuple):
    """Whether a result is on the CPU, the GPU that works, and the arguments for bare values."""

    to_cpu: bool
    gpu: int
    kwargs: dict


def target(gpus, kwargs, index):
    """Return where an operation works, and its arguments for bare values, as a Target."""
    to_cpu = False
    if kwargs.get("device") is not None:
        to_cpu = kwargs["device"].type == "cpu"
        index = None if to_cpu else index_of(kwargs["device"])
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    if index is None:
        index = next(iter(gpus))
    return Target(to_cpu, index, kwargs)


def queue_with(key, gpus):
    """Queue work; for a copy between GPUs, CUDA makes the current streams of both wait."""
    clock = queue_work(key)
    for other in gpus:
        if other != key[0]:
            other_clock = queue_work(current(other))
            merge(clock, other_clock)
            merge(other_clock, clock)
    return clock


def with_generator(random, index, func, args, kwargs):
    """Call an operation; a random one draws from the generator of its GPU."""
    args = tree_map(bare, args)
    kwargs = tree_map(bare, kwargs)
    if not random:
        return func(*args, **kwargs)
    before = torch.get_rng_state()
    torch.set_rng_state(generator_state(index))
    try:
        return func(*args, **kwargs)
    finally:
        generators[index] = torch.get_rng_state()
        torch.set_rng_state(before)


def generator_state(index):
    """Return the state of a GPU's random generator."""
    if index not in generators:
        generators[index] = torch.Generator().manual_seed(0).get_state()
    return generators[index]


def seed_all(seed):
    """Seed the random generators of all GPUs."""
    for index in range(visible()):
        generators[index] = torch.Generator().manual_seed(seed).get_state()


def makes_a_tensor(op):
    """Return whether an operation has a `device`, no tensor as argument, and one as result."""
    schema = op._schema
    return (
        len(schema.returns) == 1
        and "Tensor" in str(schema.returns[0].type)
        and any(argument.name == "device" for argument in schema.arguments)
        and not any("Tensor" in str(argument.type) for argument in schema.arguments)
    )


NOT_TRIED = ("sparse", "quantized", "cudnn", "mkldnn", "nested", "_make_dep_token", "from_file")


def register(library):
    """Give torch kernels for "CUDA" where no tensor leads to `__torch_dispatch__`.

    No tensor is among the arguments there.
    """
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or any(word in name for word in NOT_TRIED):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(A, base, None), overload or "default", None)
        if op is not None and makes_a_tensor(op):
            library.impl(name.removeprefix("aten::"), factory(op), "CUDA")
    library.impl("copy_", below_python(A.copy_.default), "CUDA")
    library.impl("_copy_from", copy_from, "CUDA")
    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")


def factory(op):
    """Return a kernel for an operation that makes a tensor."""

    def kernel(*args, **kwargs):
        with LOCK:
            return run(op, args, kwargs, index_of(kwargs.get("device")))

    return kernel


def below_python(op):
    """Return a kernel for an operation that comes here below Python's key.

    `torch.tensor(…, device=…)` is one.
    """

    def kernel(*args, **kwargs):
        with LOCK:
            return run(op, args, kwargs)

    return kernel


def copy_from(source, target, *args, **kwargs):
    """`_copy_from` is `copy_` the other way round."""
    with LOCK:
        return run(A.copy_.default, (target, source, *args), kwargs)


def attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """Return the attention as the CPU's own choice, so that the bits are the CPU's."""
    masked = attn_mask is not None and attn_mask.dtype == torch.bool
    if dropout_p or enable_gqa or q.dim() != 4 or masked:
        return A._scaled_dot_product_attention_math.default(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return A._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
