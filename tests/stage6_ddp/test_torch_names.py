"""What code written for torch's class finds here: old arguments, and names with an underscore."""

import linecache
import warnings

import pytest
import torch
import torch.distributed as dist

from ddp_course import launch
from ddp_course.stage6_ddp import DistributedDataParallel


def said(act):
    """The warnings of a call: category, text, and the line of this file that each one points to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [(w.category.__name__, str(w.message), linecache.getline(w.filename, w.lineno)) for w in caught]


def said_of_arguments():
    wrap, layer = DistributedDataParallel, torch.nn.Linear(1, 1)
    return [
        said(lambda: wrap(layer, forward_sync_buffers=True)),
        said(lambda: wrap(layer, broadcast_buffers=True)),
        said(lambda: wrap(layer, broadcast_buffers=True, forward_sync_buffers=False)),
        said(lambda: wrap(layer, check_reduction=True)),
    ]


def test_older_arguments_are_named_with_what_to_write_instead():
    """Where they stand: the warning points to the line that has the argument."""
    [(nothing, *found)] = launch(said_of_arguments, world_size=1)
    assert nothing == []
    [buffers], [both], [check] = found
    for (category, text, line), argument, begin, end in (
        (
            buffers,
            "wrap(layer, broadcast_buffers=True))",
            "broadcast_buffers is deprecated. Use forw",
            "at the beginning",
        ),
        (both, "wrap(layer, broadcast_buffers=True, forw", "broadcast_buffers is deprecated", "so it is ignored"),
        (check, "wrap(layer, check_reduction", "check_reduction is deprecated", "has no effect"),
    ):
        assert category == "FutureWarning" and argument in line
        assert text.startswith(begin) and text.endswith(end)


def said_of_static_graphs():
    parallel = DistributedDataParallel(torch.nn.Linear(1, 1))
    return [said(lambda: parallel._set_static_graph()) for _ in range(2)]


def test_a_static_graph_is_static_once():
    [(first, [(category, text, line)])] = launch(said_of_static_graphs, world_size=1)
    assert first == [] and (category, text) == ("UserWarning", "static_graph is True already")
    assert "lambda: parallel._set_static_graph()" in line


def late():
    parallel = DistributedDataParallel(torch.nn.Linear(1, 1))
    parallel(torch.ones(1, 1))
    parallel._set_static_graph()


def test_a_static_graph_is_not_for_one_that_trains():
    with pytest.raises(Exception, match="should be called before training loop starts"):
        launch(late, world_size=1)


def broadcast():
    """The first element of all tensors of the model after each way to broadcast buffers, or other tensors."""
    layers = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    parallel = DistributedDataParallel(layers, init_sync=False)
    tensors, seen = list(parallel.module.state_dict().values()), []
    mine = torch.tensor([float(dist.get_rank())])
    for arguments in ({}, {"authoritative_rank": 1}, {"bufs": [mine], "authoritative_rank": 1}):
        for tensor in tensors:
            tensor.fill_(dist.get_rank() + 1)
        parallel._default_broadcast_coalesced(**arguments)
        seen.append([int(tensor.reshape(-1)[0]) for tensor in tensors])
    return seen, mine.item()


def test_buffers_or_other_tensors_are_broadcast_from_the_rank_that_is_named():
    """weight and bias, three buffers, weight and bias."""
    for rank, (seen, other) in enumerate(launch(broadcast, world_size=2), start=1):
        assert seen == [[rank, rank, source, source, source, rank, rank] for source in (1, 2, rank)]
        assert other == 1


def test_names_that_are_ignored_are_not_among_the_data_parallel_parameters():
    layers = torch.nn.Linear(2, 1)
    wrapper = DistributedDataParallel
    assert [*wrapper._get_data_parallel_params(layers)] == [*layers.parameters()]
    assert [*wrapper._get_data_parallel_params(layers, named_params=True)] == [*layers.named_parameters()]
    wrapper._set_params_and_buffers_to_ignore_for_model(layers, ["weight"])
    assert [*wrapper._get_data_parallel_params(layers, named_params=True)] == [("bias", layers.bias)]
    [left] = wrapper._get_data_parallel_params(layers)
    assert left is layers.bias


def built_in():
    """The average of 1/3 on two ranks by each of torch's built-in hooks; and what a second hook is told."""
    found = []
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        parallel = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        parallel._register_builtin_comm_hook(kind)
        parallel(torch.full((1, 1), 1 / 3)).sum().backward()
        found.append(parallel.module.weight.grad.item())
        with pytest.raises(RuntimeError, match="register_comm_hook can only be called once"):
            parallel._register_builtin_comm_hook(kind)
    return found


def test_built_in_hooks_send_what_they_say():
    exact, half = torch.tensor(1 / 3).item(), torch.tensor(1 / 3).half().item()
    assert exact != half
    assert launch(built_in, world_size=2) == [[exact, half]] * 2


def odds_and_ends():
    """Bucket sizes as said, whether outputs are copies, and the gradient after the hooks were removed."""
    sizes = [
        DistributedDataParallel(torch.nn.Linear(1, 1), bucket_cap_mb_list=caps).bucket_bytes_cap_list
        for caps in (None, [0.5, 2])
    ]
    copied = []
    for clones in (None, False, True):
        parallel = DistributedDataParallel(torch.nn.Linear(1, 1), find_unused_parameters=True)
        if clones is not None:
            parallel._set_ddp_sink_clone(clones)
        made = []
        parallel.module.register_forward_hook(lambda module, inputs, output, made=made: made.append(output.data_ptr()))
        copied.append(parallel(torch.ones(1, 1)).data_ptr() not in made)
    parallel = DistributedDataParallel(torch.nn.Linear(1, 1))
    parallel._remove_autograd_hooks()
    parallel(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    return sizes, copied, parallel.module.weight.grad.item()


def test_odds_and_ends():
    for rank, found in enumerate(launch(odds_and_ends, world_size=2)):
        assert found == ([[], [2**19, 2**21]], [True, False, True], rank + 1)
