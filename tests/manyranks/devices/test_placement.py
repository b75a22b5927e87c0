"""Which device and backend ranks get, on machines that we do not have: `torch.cuda` is patched."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from manyranks import launch
from manyranks.devices import rank_device
from manyranks.devices.placement import BOTH, backend_for, gpu_identity, placement
from manyranks.joining.join import common_backend

module = sys.modules["manyranks.devices.placement"]  # The package has a function of the same name.


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(4)`: from now on this machine has four GPUs."""

    def have(count, usable=True):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable and count > 0)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    return have


@pytest.mark.parametrize(
    "count, world_size, device, backend, devices",
    [
        (0, 2, "auto", "gloo", ["cpu", "cpu"]),
        (1, 1, "auto", BOTH, ["cuda:0"]),
        (1, 3, "auto", "gloo", ["cuda:0"] * 3),
        (4, 4, "auto", BOTH, [f"cuda:{rank}" for rank in range(4)]),
        (8, 2, "cuda", BOTH, ["cuda:0", "cuda:1"]),
        (2, 4, "cuda", "gloo", ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        (4, 1, "cuda:3", BOTH, ["cuda:3"]),
        (4, 2, "cuda:3", "gloo", ["cuda:3", "cuda:3"]),
        (4, 2, "cpu", "gloo", ["cpu", "cpu"]),
    ],
)
def test_devices_and_backend(gpus, count, world_size, device, backend, devices):
    gpus(count)
    assert placement(device, world_size) == (backend, devices)


def test_gpus_that_cuda_cannot_use_are_left_alone(gpus):
    gpus(2, usable=False)
    assert placement("auto", 2) == ("gloo", ["cpu", "cpu"])
    with pytest.raises(ValueError, match="CUDA can use 0 GPUs here; try --device cpu"):
        placement("cuda", 2)


def test_ranks_on_the_cpu_see_no_gpu():
    visible = launch(lambda: os.environ["CUDA_VISIBLE_DEVICES"], world_size=2, device="cpu")
    assert visible == ["", ""]


@pytest.mark.parametrize(
    "identities, backend",
    [
        (["a/1", "a/2", "b/1"], BOTH),
        (["a/1", "a/1"], "gloo"),  # Two ranks are on one GPU, whatever they call it.
        (["a/1", "cpu"], "gloo"),
        (["cpu"], "gloo"),
    ],
)
def test_ranks_agree_on_a_backend(gpus, identities, backend):
    gpus(1)
    assert backend_for(identities) == backend


@pytest.mark.parametrize(
    "asked, version, backend",
    [("1", (2, 30, 3), BOTH), ("1", (2, 29), "gloo"), ("0", (3, 0), "gloo")],
)
def test_ranks_share_a_gpu_over_nccl_where_it_can_and_is_asked(
    gpus, monkeypatch, asked, version, backend
):
    gpus(1)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", asked)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert placement("auto", 3)[0] == placement("cuda:0", 2)[0] == backend
    assert backend_for(["a/1", "a/1"]) == backend
    assert backend_for(["a/1", "cpu"]) == "gloo"


def test_slurms_one_gpu_a_task_is_nccl(gpus, monkeypatch):
    """Every task has a cuda:0 of its own, and four of them are on this host.

    By the count alone it would be gloo.
    """
    gpus(1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="U0")
    )
    assert placement("auto", 4)[1] == ["cuda:0"] * 4
    for last, backend in (("host/U3", BOTH), (gpu_identity("cuda:0"), "gloo")):
        store = dist.HashStore()
        for rank, name in enumerate(["", "host/U1", "host/U2", last]):
            store.set(f"manyranks/gpu/{rank}", name)
        assert common_backend(store, 0, 4, "cuda:0") == backend


def test_the_device_of_a_rank_under_torchrun(gpus, monkeypatch):
    gpus(2)
    monkeypatch.delenv("MANYRANKS_DEVICE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert rank_device() == torch.device("cuda:1")
    gpus(0)
    assert rank_device() == torch.device("cpu")


@pytest.mark.parametrize(
    "ranks, count, words",
    [
        (
            4,
            2,
            "4 ranks on 2 GPUs talk through gloo: NCCL wants a GPU each; world_size=2 uses NCCL",
        ),
        (3, 1, "3 ranks on 1 GPU talk through gloo: NCCL wants a GPU each"),
        (2, 2, ""),
        (2, 0, ""),
    ],
)
def test_ranks_that_share_gpus_are_said_once(ranks, count, words, capsys):
    module.say_sharing.cache_clear()
    for _ in range(2):
        module.say_sharing(ranks, count)
    assert capsys.readouterr().err.strip() == words


@pytest.mark.parametrize(
    "device, set_to, visible", [("cuda:1", ["cuda:1"], "0,1"), ("cpu", [], "")]
)
def test_a_rank_settles_on_its_device(device, set_to, visible, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for name in module.QUIET_NCCL:
        # Only a variable that was set by monkeypatch is taken away again after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    module.settle_on(device)
    assert chosen == set_to
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    quiet = {name: os.environ.get(name) for name in module.QUIET_NCCL}
    assert (quiet == module.QUIET_NCCL) == (device != "cpu")
