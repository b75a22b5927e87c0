"""The walk over the graph, and the entrance to it, without ranks."""

from dataclasses import dataclass

import torch

from ddp_course.stage6_ddp.unused import behind_entrance, not_finished, ready_twice, tensors_in, used_anew, used_by


def test_each_node_is_met_once():
    """A graph with more ways through it than could ever be walked."""
    weight, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    total = weight
    for _ in range(60):
        total = total + total
    assert used_by([total]) == {weight}
    assert used_by([total, other * 1]) == {weight, other}
    assert used_by([other]) == {other}, "an output that is a parameter"


def test_tensors_are_found_wherever_torch_looks():
    @dataclass
    class Output:
        first: torch.Tensor
        rest: dict

    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    found = tensors_in([Output(a, {"b": (b, "text")}), [c, None, 3]])
    assert [tensor.numel() for tensor in found] == [1, 2, 3]
    assert tensors_in("text") == tensors_in({1, 2}) == []


def test_what_passes_the_entrance_keeps_its_structure():
    """Copies, unless they are not wanted; what has no graph does not pass, and stays the same object."""
    weight, plain = torch.nn.Parameter(torch.ones(2)), torch.zeros(2)
    for clones, said in ((True, {}), (True, {"clones": True}), (False, {"clones": False})):
        entered, product = [], weight * 2
        outputs = {"product": product, "others": (plain, None)}
        passed = behind_entrance(outputs, lambda entered=entered: entered.append("yes"), **said)
        assert list(passed) == ["product", "others"] and passed["others"][0] is plain and passed["others"][1] is None
        assert (passed["product"].data_ptr() != product.data_ptr()) is clones
        assert torch.equal(passed["product"], product) and not entered
        weight.grad = None
        passed["product"].sum().backward()
        assert entered == ["yes"] and weight.grad.tolist() == [2, 2]


def test_an_output_that_the_loss_does_not_use_gets_a_gradient_that_is_none():
    """It travels on as an undefined one: the parameter's gradient stays None, and is not filled with zeros."""
    used, idle = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    reached = []
    end = idle.view_as(idle).grad_fn.next_functions[0][0]  # kept: without its node the hook is gone
    end.register_hook(lambda *_: reached.append("idle"))
    first, _ = behind_entrance((used * 1, idle * 1), lambda: None)
    first.sum().backward()
    assert used.grad.tolist() == [1, 1] and idle.grad is None and reached == ["idle"]


def test_the_words_are_those_that_people_search_for():
    for static, searched, words in (
        (False, False, "You can enable unused parameter detection by passing the keyword argument"),
        (False, True, "Since `find_unused_parameters=True` is enabled, this likely means"),
        (True, False, "your training graph has changed in this iteration"),
        (True, True, "your training graph has changed in this iteration"),
    ):
        text = not_finished({1: "bias", 4: "head.weight"}, 3, static, searched)
        assert words in text and text.startswith("Expected to have finished reduction in the prior iteration")
        assert "for rank 3: 1 4\n" in text and "for rank 3: bias, head.weight\n" in text
        assert "TORCH_DISTRIBUTED_DEBUG" in text
    assert used_anew("bias").endswith("static_graph set to True. It is bias.")
    assert "mark a variable ready only once, but parameter bias became ready twice" in ready_twice("bias")
