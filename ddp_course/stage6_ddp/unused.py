"""Parameters that get no gradient: which they are, and what to tell people who did not expect it.

A bucket leaves when all its gradients are there. If the model skips a layer, that moment never comes. With
`find_unused_parameters=True` every forward pass ends with a walk over the autograd graph, from the outputs down
to the parameters; those that it does not meet are marked ready at once, with zeros.

Others may have used them, so the ranks add up a bitmap as well: 1 for used here. Where the sum is 0, nobody used
the parameter and its gradient stays as it was, even None; everywhere else it gets the average.
"""

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten


def used_by(outputs):
    """Return the set of parameters that the graph behind the tensors `outputs` leads to."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen, used = set(waiting), {tensor for tensor in outputs if tensor.is_leaf}
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):  # an AccumulateGrad node: the end of the road
            used.add(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return used


def tensors_in(outputs):
    """All tensors in what a forward pass returned: in lists, tuples, dicts and dataclasses."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if hasattr(outputs, "__dataclass_fields__"):
        outputs = vars(outputs)
    children = outputs.values() if isinstance(outputs, dict) else outputs
    return [t for child in children for t in tensors_in(child)] if isinstance(outputs, (dict, list, tuple)) else []


def used_anywhere(used_here, device, group=None):
    """Add the ranks' bitmaps up: start it here, and get a function that returns a list of counts, one a parameter."""
    counts = torch.tensor(used_here, dtype=torch.int32).to(device)
    work = dist.all_reduce(counts, group=group, async_op=True)

    def wait():
        work.wait()
        return counts.tolist()

    return wait


class Entrance(Function):
    """The identity, placed between the outputs and the loss: `entered()` is called when backward begins.

    As all outputs pass through this one node, an output that the loss does not use still gets a gradient, an
    undefined one, which travels down to the parameters and sets off their hooks.
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
    """Return `outputs`, in the same structure, with every tensor that has a graph passed through one `Entrance`."""
    leaves, structure = tree_flatten(outputs)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    if places:
        passed = Entrance.apply(entered, *(leaves[place] for place in places))
        for place, tensor in zip(places, passed, strict=True):
            leaves[place] = tensor
    return tree_unflatten(leaves, structure)


def not_finished(names, rank, static_graph):
    """What to tell when the next iteration begins and these parameters still have no gradient."""
    reason = (
        "With static_graph=True every iteration must use the same parameters as the first one did."
        if static_graph
        else "Some parameters took no part in producing the loss. Pass find_unused_parameters=True if that is meant, "
        "and make sure that the loss depends on all outputs of `forward`, and that these are in lists, tuples, dicts "
        "or dataclasses."
    )
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        f"{reason} Parameters which did not receive grad for rank {rank}: {', '.join(names)}"
    )


def ready_twice(name):
    """What to tell when a gradient becomes ready a second time in one backward pass."""
    return (
        f"Expected to mark a variable ready only once, but parameter {name} became ready twice in one backward pass. "
        "Either it is used outside of the module's `forward`, or a layer is checkpointed several times with "
        "use_reentrant=True, or find_unused_parameters=True took it for unused because the graph was hidden from it. "
        "static_graph=True can handle all three as long as every iteration does the same."
    )
