"""Buffers on their way to the other ranks; how many travel in a message is looked at in test_stage6_ddp.py."""

import torch
import torch.distributed as dist

from ddp_course import launch
from ddp_course.stage6_ddp.buffers import broadcast_buffers, broadcast_tensors


def sent():
    """Tensors of two dtypes after each way to broadcast them, from rank 0 where no other is named."""
    found = []
    for send, source in ((broadcast_tensors, ()), (broadcast_tensors, (1,))):
        tensors = [torch.full((2,), dist.get_rank() + 5.0), torch.tensor(dist.get_rank() + 7)]
        send(tensors, *source)
        found.append([tensors[0].tolist(), tensors[1].item()])
    for source in ((), (1,)):
        buffers = {"mean": torch.full((2,), dist.get_rank() + 5.0)}
        broadcast_buffers(buffers, *source)
        found.append(buffers["mean"].tolist())
    return found


def test_all_get_those_of_one_rank():
    expected = [[[5, 5], 7], [[6, 6], 8], [5, 5], [6, 6]]
    assert launch(sent, world_size=3) == [expected] * 3


def between_forward_and_backward(send):
    """The gradient of a pass whose saved buffer was overwritten, with the same value, before the way back."""
    weight, buffer = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    product = (weight * buffer).sum()
    send(buffer)
    try:
        product.backward()
    except RuntimeError as error:
        return str(error)
    return weight.grad.tolist()


def noticed():
    ways = (lambda buffer: broadcast_buffers({"": buffer}, 0), lambda buffer: broadcast_tensors([buffer], 0))
    return [between_forward_and_backward(send) for send in ways]


def test_autograd_does_not_notice_buffers():
    """It does notice tensors: a rank that was sent others' weights in the middle of a pass is told so."""
    [_, [quiet, loud]] = launch(noticed, world_size=2)
    assert quiet == [3, 3] and "modified by an inplace operation" in loud
