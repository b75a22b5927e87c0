"""Optimizers that step inside `backward()`, so that no gradient outlives its update.

`torch.distributed.optim._apply_optimizer_in_backward` gives each parameter an optimizer of its own, to be run as soon
as its gradient is there. With data parallelism that is too early: the gradient has not been averaged yet.
"""


def take_over(parameters):
    """Stop the optimizers of `parameters` from running on local gradients; return the parameters that have one."""
    chosen = {parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")}
    if not chosen:
        return chosen
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map  # it is slow

    for parameter in chosen:
        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()
    return chosen


def step(parameters):
    """Update `parameters`, whose gradients are averages now, and drop the gradients."""
    for parameter in parameters:
        for optimizer in parameter._in_backward_optimizers:
            optimizer.step()
        parameter.grad = None
