"""Finds parameters that get no gradient, and has the words for those who did not expect any.

A bucket leaves when all its gradients are there. If the model skips a layer, that moment never
comes. With `find_unused_parameters=True` every forward pass ends with a walk over the autograd
graph, from the outputs down to the parameters; a parameter that the walk does not meet is marked
ready at once, with zeros.

Other ranks may have used this parameter, so the ranks also add up a bitmap: 1 means that this rank
used it. Where the sum is 0, no rank used the parameter, and its gradient stays as it was, even
None; otherwise it gets the average.
"""

import torch
import torch.distributed as dist
from torch.autograd import Function

from manyranks.torch_inside import tree_leaves, tree_map_only


def used_by(outputs):
    """Return the set of parameters that the graph behind the tensors `outputs` leads to."""
    functions = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    _, leaves = graph_behind(functions)
    return leaves | {tensor for tensor in outputs if tensor.is_leaf}


def graph_behind(roots, stop=()):
    """Return the functions and the leaves of the graph behind the autograd functions `roots`.

    The functions include `roots`. The walk does not go into the functions `stop`.
    """
    functions = [*roots]
    leaves = set()
    known = {None, *roots, *stop}
    # The loop also visits the functions that it appends.
    for function in functions:
        # Other functions may have a `variable`, too.
        if type(function).__name__ == "AccumulateGrad":
            leaves.add(function.variable)
        for following, _ in function.next_functions:
            if following not in known:
                known.add(following)
                functions.append(following)
    return functions, leaves


def count_users(used_here, device, group=None):
    """Start to add up the ranks' bitmaps; return a function that waits for the users of each."""
    counts = torch.tensor(used_here, dtype=torch.int32).to(device)
    work = dist.all_reduce(counts, group=group, async_op=True)

    def wait():
        work.wait()
        return counts.tolist()

    return wait


class Entrance(Function):
    """The identity, placed between outputs and loss, which calls `entered()` as backward begins.

    As all outputs pass through this one node, an output that the loss does not use still gets a
    gradient, an undefined one, which travels down to the parameters and sets off their hooks.
    Outputs are copied, because autograd refuses in-place operations on an input that a function
    returns as it is.
    """

    @staticmethod
    def forward(ctx, entered, *tensors):
        ctx.set_materialize_grads(False)
        ctx.entered = entered
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.entered()
        return None, *gradients


def behind_entrance(outputs, entered):
    """Return `outputs`, in the same structure, with all computed tensors behind one `Entrance`."""
    tensors = filter(torch.is_tensor, tree_leaves(outputs))
    computed = [tensor for tensor in tensors if tensor.grad_fn is not None]
    if not computed:
        return outputs
    inside = dict(zip(computed, Entrance.apply(entered, *computed), strict=True))
    return tree_map_only(torch.Tensor, lambda tensor: inside.get(tensor, tensor), outputs)


# The words of the messages are torch's, because people search the web for them.

UNUSED = (
    "This error indicates that your module has parameters that were not used in producing loss. You"
    " can enable unused parameter detection by passing the keyword argument"
    " `find_unused_parameters=True`, and by making sure all `forward` function outputs participate"
    " in calculating loss, and that they are in lists, tuples, dicts or dataclasses."
)
UNUSED_ALTHOUGH_SEARCHED = (
    "Since `find_unused_parameters=True` is enabled, this likely means that not all outputs of"
    " `forward` are in lists, tuples, dicts or dataclasses, or that not all of them participate in"
    " calculating loss."
)
CHANGED = (
    "This error indicates that your training graph has changed in this iteration, e.g., one"
    " parameter is used in first iteration, but then got unused in the second iteration. this is"
    " not compatible with static_graph set to True."
)

# These two are the course's own.

RETURNED = (
    "torch.autograd.grad returns this rank's gradients, which nobody averages. Call backward(), and"
    " read parameter.grad; for gradients of this rank alone, call torch.autograd.grad within"
    " no_sync()"
)
OUT_OF_STEP = (
    "a rank ran another forward pass than the others, so that something else came where rank 0's"
    " order of gradients was awaited. All ranks must run the same passes of a wrapper; for an"
    " evaluation on one rank, call its module: wrapper.module(inputs)"
)


def not_finished(missing, rank, reason):
    """Return the error of an iteration that begins while parameters lack gradients.

    These are `missing`, {index: name}.
    """
    indices = " ".join(map(str, missing))
    names = ", ".join(missing.values())
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one."
        f" {reason}\nParameter indices which did not receive grad for rank {rank}:"
        f" {indices}\nParameters which did not receive grad for rank {rank}: {names}\n(torch's own"
        " class tells the names only if you set the environment variable TORCH_DISTRIBUTED_DEBUG"
        " to either INFO or DETAIL.)"
    )


def used_anew(name):
    """Return the error of a static graph that reaches a parameter more often than at first."""
    return (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first"
        " iteration, but then got used in the second iteration. this is not compatible with"
        f" static_graph set to True. It is {name}."
    )


def ready_twice(name):
    """Return the error of a gradient that becomes ready a second time in one backward pass."""
    return (
        f"Expected to mark a variable ready only once, but parameter {name} became ready twice in"
        " one backward pass: used outside of `forward`, checkpointed several times with"
        " use_reentrant=True, or hidden from find_unused_parameters=True. static_graph=True can"
        " handle that if every iteration does the same."
    )


def bypassed(name):
    """Return the error of a gradient that does not come from a forward pass of the wrapper."""
    return (
        f"Parameter {name} got a gradient in a backward pass that does not come from what the"
        " wrapper returned, so nobody would average it. Call the wrapper, not its module, or a part"
        " of it; to keep gradients on their rank, call it within no_sync(). A loss that goes"
        " another way to the parameters, as a gradient penalty does, is to be added to the loss"
        " that comes from the outputs. If the model is trained without this wrapper, delete it."
    )
