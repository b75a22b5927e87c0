"""What a communication hook is given and may return, without ranks."""

import pytest
import torch

from ddp_course.stage6_ddp.bucket_sums import GradBucket, by_hook


def bucket(dtype=torch.float32):
    """Return a bucket of two parameters with 1, 2, 3."""
    flat = torch.tensor([1.0, 2.0, 3.0]).to(dtype)
    return GradBucket(4, flat, [torch.zeros(1), torch.zeros(2)], is_last=True)


def ready(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def test_a_hook_may_return_a_tensor_or_a_list_with_it():
    first = torch.ones(3)
    second = torch.zeros(3)
    for value in (first, [first], (first, second)):
        assert by_hook(lambda state, bucket, value=value: ready(value), None)(bucket())() is first


def test_a_hook_is_given_the_state_and_the_bucket():
    calls = []

    def note(state, bucket):
        calls.append((state, bucket))
        return ready(None)

    given = bucket()
    by_hook(note, "state")(given)
    assert calls == [("state", given)]


def test_a_hook_that_returns_no_future_is_told_so():
    with pytest.raises(
        TypeError, match=r"must return a torch.futures.Future, but .*hook.* returned None"
    ):
        by_hook(print_hook, None)(bucket())


def print_hook(state, bucket):
    """Print, and return nothing: a hook that forgot what it is for."""
