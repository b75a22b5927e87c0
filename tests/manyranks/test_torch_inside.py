"""What torch does not promise does what launching and virtual time rely on."""

import torch

from manyranks import torch_inside


def test_a_backward_pass_has_a_number_and_calls_back_at_its_end():
    seen = []
    weight = torch.ones(3, requires_grad=True)

    def note(gradient):
        seen.append(torch_inside.backward_pass())
        torch_inside.after_backward(lambda: seen.append(weight.grad is not None))

    doubled = weight * 2
    doubled.register_hook(note)
    assert torch_inside.backward_pass() == -1
    doubled.sum().backward()
    assert seen[0] >= 0
    assert seen[1:] == [True]
    (weight * 2).sum().backward()
    assert seen[1:] == [True]
