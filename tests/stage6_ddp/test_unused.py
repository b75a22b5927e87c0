"""The walk over the graph, and the entrance to it, without ranks."""

import torch

from ddp_course.stage6_ddp.unused import behind_entrance, used_by


def test_each_node_is_met_once():
    """The graph has more ways through it than could ever be walked."""
    weight = torch.nn.Parameter(torch.ones(1))
    other = torch.nn.Parameter(torch.ones(1))
    total = weight
    for _ in range(60):
        total = total + total
    assert used_by([total]) == {weight}
    assert used_by([total, other * 1]) == {weight, other}
    assert used_by([other]) == {other}, "an output that is a parameter"


def test_outputs_behind_the_entrance_keep_their_structure():
    """Tensors with a graph are copied, so that they may be changed in place.

    The others stay the same objects.
    """
    weight = torch.nn.Parameter(torch.ones(2))
    plain = torch.zeros(2)
    entered = []
    product = weight * 2
    passed = behind_entrance(
        {"product": product, "others": (plain, None)}, lambda: entered.append("yes")
    )
    assert list(passed) == ["product", "others"]
    assert passed["others"][0] is plain
    assert passed["others"][1] is None
    assert passed["product"].data_ptr() != product.data_ptr()
    assert torch.equal(passed["product"], product)
    assert not entered
    passed["product"].mul_(1).sum().backward()
    assert entered == ["yes"]
    assert weight.grad.tolist() == [2, 2]
