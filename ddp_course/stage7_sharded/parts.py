"""Parts: weights and gradients of which this rank has a part, and what may be computed from it.

Element by element, a part is as good as the whole. A function that mixes elements, such as a norm,
an initialiser that looks at the shape, or an optimizer that multiplies matrices, would give another
result on every rank. Nothing would fail, and the model would be trained wrongly. So a part knows
that it is one, by its class, and is given to a function only if torch marks that function as
working element by element (`torch.Tag.pointwise`), or if it leaves all elements as they are.
"""

from functools import cache

import torch
import torch.distributed as dist

from manyranks.torch_inside import tensors_in, tree_map_only

from ..base.torch_private import Operator, allow_foreach, as_plain_tensors

# These functions copy elements, convert them, or make room for as many.
SAME_ELEMENTS = """
    view view_as reshape flatten cat split view_as_real view_as_complex detach detach_ contiguous
    to type cpu cuda float double half bfloat16 conj copy_ _foreach_copy_ zero_ _foreach_zero_ fill_
    constant_ zeros_like ones_like full_like empty_like new_empty new_zeros new_ones new_full
    requires_grad_
"""
# These tell something of the tensor itself, show it to a person, or have autograd work on it.
NO_ELEMENTS = """
    size dim ndimension numel nelement element_size stride storage_offset data_ptr untyped_storage
    get_device is_contiguous is_floating_point is_complex is_pinned is_shared share_memory_
    register_hook register_post_accumulate_grad_hook backward grad
    __len__ __repr__ __format__ __set__ __delete__
"""
OPTIMIZERS = "_fused_sgd_ _fused_adam_ _fused_adamw_ _fused_adagrad_"
OTHER_SHAPES = """
    view view_as reshape flatten cat split view_as_real view_as_complex grad
    new_empty new_zeros new_ones new_full
"""
# The training loop, or torch, may apply these to a gradient before the average.
LINEAR = """
    clone detach detach_ requires_grad_ zero_ _foreach_zero_ add_ mul_ div_ _foreach_mul_
    __imul__ __itruediv__ __get__ __set__ __repr__ __format__ __len__
"""
ALLOWED = frozenset(f"{SAME_ELEMENTS} {NO_ELEMENTS} {OPTIMIZERS}".split())
MAY_CHANGE_SHAPE = frozenset(OTHER_SHAPES.split())
ALLOWED_BEFORE_AVERAGE = frozenset(LINEAR.split())
ACCESS = {"__get__", "__set__"}  # torch calls these to read and to write an attribute.
TRANSPOSED = {"T", "mT", "H", "mH"}
# torch marks these as working element by element, but they make one number of all elements.
NOT_POINTWISE = {"equal", "_foreach_max"}
# The keys are other names of functions, and the values the names that torch marks.
ALIASES = {
    "floordiv": "div",
    "floor_divide": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "absolute": "abs",
    "negative": "neg",
}


STATE_OF_WHOLE = (
    "this rank has a part of the tensor only. An optimizer that has taken steps keeps state for"
    " whole tensors: make the optimizer anew after the model is split"
)

# {what torch calls: what people have called}
REFUSED = {
    "_amp_foreach_non_finite_check_and_unscale_": (
        "GradScaler looks for infinite gradients on every rank for itself, so one rank could leave"
        " out a step that the others take. Train sharded and split models without scaling the loss:"
        " in bfloat16, whose range is float32's, or with stage 6, where all ranks have the same"
        " gradients"
    ),
    "_has_compatible_shallow_copy_type": (
        "a sharded or split model cannot be moved or converted: do that before it is wrapped or"
        " split, or after restore()"
    ),
}
WHOLE_STATES = (
    "The whole state is returned by state_dict() and optimizer_state_dict(optimizer) of"
    " FullyShardedDataParallel, by state_dict() of ShardedOptimizer and Pipeline, and after"
    " stage9_tensor.restore(model); all ranks call these"
)


class Part(torch.Tensor):
    """A tensor of which other ranks have other parts.

    For functions that work element by element it is an ordinary tensor. `tensor.as_subclass(Part)`
    is a part on the same memory. Results that are computed from a part are parts, and so is the
    gradient of a parameter that is a part.
    """

    is_part = True  # `checkpoint` asks for this.
    refusal = (
        "is not known to work element by element, and this rank has a part of the tensor only."
        " Optimizers must work element by element, as SGD and Adam do, and as Muon, Adafactor and"
        " LBFGS, which look at whole matrices, do not. To clip, call clip_grad_norm_ of"
        " FullyShardedDataParallel, ShardedOptimizer, Pipeline or stage9_tensor instead; initialise"
        " weights before the model is wrapped or split, and write values by copy_(…); to look at"
        " the part, take tensor.as_subclass(torch.Tensor)"
    )

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # A dispatch mode calls operators on behalf of functions that were allowed.
        if isinstance(function, Operator):
            with as_plain_tensors():
                return function(*args, **kwargs)
        name = function.__name__
        cls.check(name, function, args)
        try:
            with as_plain_tensors():
                result = function(*args, **kwargs)
        except RuntimeError as error:
            if "must match the size" not in str(error):
                raise
            raise RuntimeError(f"{error}; {STATE_OF_WHOLE}") from error
        if name.endswith("_"):
            mark_changed(name, args)
        if name.startswith("_foreach_"):
            return marked_like_lists(result, args)
        if name not in MAY_CHANGE_SHAPE and name not in ACCESS:
            shapes = [each.shape for each in tensors_in(args, kwargs) if isinstance(each, Part)]
            if any(each.shape not in shapes for each in tensors_in(result)):
                raise RuntimeError(f"{label(function)} {cls.refusal}")
        # The result of a parameter is a part, but no parameter.
        kind = Part if issubclass(cls, torch.nn.Parameter) else cls
        return marked(result, kind)

    @classmethod
    def check(cls, name, function, args):
        """Raise RuntimeError if parts may not be among the arguments of a function."""
        if name == "__set__" and label(function) == "data" and not cls.takes(*args):
            raise RuntimeError(
                "this parameter is a part of one, and lies in memory of its own: write values into"
                " it by copy_(…), and whole weights before the model is wrapped or split"
            )
        if not cls.allows(function, args):
            raise RuntimeError(REFUSED.get(name, f"{label(function)} {cls.refusal}"))
        if name.startswith("_fused_"):
            parameters, _, state, *_ = args
            if state and [each.shape for each in state] != [each.shape for each in parameters]:
                # The fused function would read as many elements as a part has from the whole.
                raise RuntimeError(STATE_OF_WHOLE)

    @classmethod
    def allows(cls, function, args):
        """Return whether parts may be among the arguments of `function`.

        They may if it works element by element, leaves the elements as they are, or communicates.
        """
        name = function.__name__
        if name == "__get__":
            return label(function) not in TRANSPOSED
        # A mask chooses elements one by one.
        if name == "__setitem__":
            return isinstance(args[1], Part) and args[1].dtype == torch.bool
        if name in ALLOWED or is_pointwise(name):
            return True
        return getattr(function, "__module__", "") == dist.distributed_c10d.__name__

    @classmethod
    def takes(cls, tensor, values):
        """Return whether `tensor.data = values` may be done: it must leave a part the same part."""
        return values.shape == tensor.shape

    def __deepcopy__(self, memo):
        with as_plain_tensors():
            copied = self.detach().clone().as_subclass(type(self))
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol):
        """Return the part for pickling, with the rank whose part it is."""
        place = getattr(self, "place", own_place())
        return part_of_rank, (self.as_subclass(torch.Tensor), *place)


allow_foreach(Part)


class OthersPart(Part):
    """A part that another rank saved, or that was saved with another number of ranks.

    `place` is that rank and that number. Nothing can be computed from such a part.
    """

    @classmethod
    def check(cls, name, function, args):
        """Raise RuntimeError, whatever the function is."""
        (part, *_) = [each for each in tensors_in(args) if isinstance(each, OthersPart)]
        (rank, ranks) = part.place
        (own_rank, own_ranks) = own_place()
        raise RuntimeError(
            f"this is a part that rank {rank} of {ranks} saved, and here is rank {own_rank} of"
            f" {own_ranks}: let every rank load what it has saved, with as many ranks; or save what"
            f" any number of ranks can load. {WHOLE_STATES}"
        )


def own_place():
    """Return this process's rank, and the number of ranks."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def part_of_rank(tensor, rank, ranks):
    """Return the part that `rank` of `ranks` saved, as it is unpickled.

    On that rank it is a part again, elsewhere it is an `OthersPart`, and without ranks it is an
    ordinary tensor.
    """
    if not dist.is_initialized():
        return tensor
    part = tensor.as_subclass(Part if own_place() == (rank, ranks) else OthersPart)
    part.place = (rank, ranks)
    return part


torch.serialization.add_safe_globals([part_of_rank])


class OwnGradient(Part):
    """A gradient before the average: whole, but of this rank's samples.

    Only linear functions may precede the sum, and what they return has to be averaged too.
    """

    refusal = (
        "would come before the gradients are averaged, on every rank for itself. To clip, call"
        " clip_grad_norm_ of ShardedOptimizer; for all else take FullyShardedDataParallel, or stage"
        " 6 and an ordinary optimizer"
    )

    @classmethod
    def allows(cls, function, args):
        """Return whether a function is linear, and so may precede the average."""
        return function.__name__ in ALLOWED_BEFORE_AVERAGE


class PartOfParameter(Part, torch.nn.Parameter):
    """A parameter that is a part; so is its gradient."""


def label(function):
    """Return the name by which people know `function`.

    If it reads or writes an attribute, that is the attribute's name, or "" if that has none.
    """
    if function.__name__ in ACCESS:
        return getattr(function.__self__, "__name__", "")
    return function.__name__


@cache
def is_pointwise(name):
    """Return whether torch marks the function called `name` as working element by element.

    `_foreach_mul_`, `mul_`, `__mul__` and `__imul__` are forms of `mul`.
    """
    if name in NOT_POINTWISE:
        return False
    base = name.removeprefix("_foreach_").strip("_")
    forms = [base]
    if name.startswith("__"):
        forms.append(base[1:])  # without the i or r of __imul__ and __rmul__
    forms += [ALIASES[form] for form in forms if form in ALIASES]
    for form in forms:
        function = getattr(torch.ops.aten, form, None)
        if hasattr(function, "overloads"):
            overloads = [getattr(function, name) for name in function.overloads()]
            if any(torch.Tag.pointwise in overload.tags for overload in overloads):
                return True
    return False


def mark_changed(name, args):
    """Make tensors into which parts were written, such as an optimizer's moments, parts, too.

    Parameters stay what they are.
    """
    written = args if name.startswith("_fused_") else args[:1]
    for tensor in tensors_in(*written):
        if type(tensor) is torch.Tensor and tensor.dim():
            tensor.__class__ = Part


def marked_like_lists(result, args):
    """Make each tensor of `result` a part if one of its operands is.

    The function goes through the lists among `args` side by side.
    """
    if result is None:
        return None
    lists = [each for each in args if isinstance(each, list | tuple)]
    tensors = []
    for tensor, *operands in zip(result, *lists, strict=True):
        has_part = any(isinstance(operand, Part) for operand in operands)
        tensors.append(marked(tensor, Part) if has_part else tensor)
    return tensors


def marked(result, kind):
    """Return `result` with its ordinary tensors as tensors of the class `kind`."""

    def mark(tensor):
        return tensor if isinstance(tensor, Part) else tensor.as_subclass(kind)

    return tree_map_only(torch.Tensor, mark, result)


def refuse_with(words):
    """Return a function that raises RuntimeError with these `words`, in place of a method."""

    def refuse(*_, **__):
        raise RuntimeError(words)

    return refuse
