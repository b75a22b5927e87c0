"""Stage 2 equals one device, on any number of devices of one process."""

import threading

import pytest
import torch
from oracles import tiny_batches, tiny_model, trained_alone, weights

from ddp_course import stage2_dataparallel as stage2


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_training_equals_one_device(devices):
    model = tiny_model()
    stage2.train(model, tiny_batches(), 0.1, ["cpu"] * devices)
    assert (weights(model) - trained_alone()).abs().max() < 1e-14


@pytest.mark.parametrize("broken", ["reduce", "parallel_backward"])
def test_without_reduce_or_backward_it_does_not(monkeypatch, broken):
    monkeypatch.setattr(stage2, broken, lambda *args: None)
    model = tiny_model()
    stage2.train(model, tiny_batches(), 0.1, ["cpu"] * 2)
    assert (weights(model) - trained_alone()).abs().max() > 1e-4


def test_scatter_covers_the_batch_in_order():
    batch = torch.arange(10).view(10, 1)
    shards = stage2.scatter(batch, ["cpu"] * 3)
    assert [len(shard) for shard in shards] == [4, 3, 3]
    assert torch.equal(torch.cat(shards), batch)


def test_a_batch_smaller_than_the_devices_leaves_some_idle():
    model = tiny_model()
    alone = tiny_model()
    parallel = stage2.DataParallel(model, ["cpu"] * 4)
    inputs, targets = next(tiny_batches(batch=3))
    torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
    parallel.backward()
    torch.nn.functional.cross_entropy(alone(inputs), targets).backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=0, atol=1e-15)


def test_replicas_are_copies_that_start_without_gradients():
    model = tiny_model()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    master, replica = stage2.replicate(model, ["cpu", "cpu"])
    assert master is model
    assert replica[0].weight.grad is None
    assert torch.equal(replica[0].weight, model[0].weight)
    assert replica[0].weight.data_ptr() != model[0].weight.data_ptr()


def test_every_device_has_a_thread_and_threads_know_of_no_grad():
    seen = set()
    barrier = threading.Barrier(3, timeout=300)

    def function(number):
        barrier.wait()  # This ends only if three threads are here at once.
        seen.add((threading.get_ident(), torch.is_grad_enabled()))
        return number

    with torch.no_grad():
        assert stage2.in_threads(function, [1, 2, 3]) == [1, 2, 3]
    assert len({thread for thread, _ in seen}) == 3
    assert {enabled for _, enabled in seen} == {False}


def test_an_exception_in_a_thread_reaches_the_caller():
    parallel = stage2.DataParallel(tiny_model(), ["cpu", "cpu"])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        parallel(torch.randn(4, 5, dtype=torch.float64))


@pytest.mark.parametrize("devices", [[], 3])
def test_what_is_no_list_of_devices_is_refused(devices):
    with pytest.raises(ValueError, match="a list with a device for each replica"):
        stage2.DataParallel(tiny_model(), devices)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda():
    model = tiny_model()
    batches = ((inputs, targets.cuda(0)) for inputs, targets in tiny_batches())
    stage2.train(
        model, batches, 0.1, [f"cuda:{index % torch.cuda.device_count()}" for index in range(2)]
    )
    assert (weights(model).cpu() - trained_alone()).abs().max() < 1e-12
