"""A bucket by itself: what waits in it, when it is a view, and what it shows of a sparse gradient."""

import pytest
import torch

from ddp_course.stage6_ddp.buckets import AT_ONCE, SMALL, Bucket, SparseBucket


def with_gradients(count, elements):
    """Parameters with gradients 2, 4, 6, …"""
    parameters = [torch.nn.Parameter(torch.zeros(elements)) for _ in range(count)]
    for number, parameter in enumerate(parameters, start=1):
        parameter.grad = torch.full((elements,), 2.0 * number)
    return parameters


def test_small_gradients_wait_but_not_too_many():
    parameters = with_gradients(AT_ONCE + 2, 3)
    bucket, waiting = Bucket(0, parameters, as_view=False, lends=False), []
    bucket.flat.fill_(-1)
    for slot in range(len(parameters)):
        bucket.take(slot, 2)
        waiting.append(len(bucket.waiting))
    assert waiting == [*range(1, AT_ONCE), 0, 1, 2]
    assert bucket.flat.tolist() == [float(n) for n in range(1, AT_ONCE + 1) for _ in range(3)] + [-1.0] * 6
    bucket.fill(2)
    assert bucket.flat[-6:].tolist() == [AT_ONCE + 1.0] * 3 + [AT_ONCE + 2.0] * 3 and not bucket.waiting


def test_a_large_gradient_moves_at_once():
    for elements, waits in ((SMALL // 4, 1), (SMALL // 4 + 1, 0)):
        bucket = Bucket(0, with_gradients(1, elements), as_view=False, lends=False)
        bucket.take(0, 2)
        assert len(bucket.waiting) == waits and (waits or bucket.flat.unique().tolist() == [1.0])


def test_gradients_are_views_where_the_bucket_has_their_dtype():
    for dtype, views in ((None, True), (torch.float32, True), (torch.bfloat16, False)):
        parameters = with_gradients(2, 3)
        bucket = Bucket(0, parameters, as_view=True, lends=False, dtype=dtype)
        assert bucket.as_view is views
        assert [p.grad.data_ptr() == v.data_ptr() for p, v in zip(parameters, bucket.views, strict=True)] == [views] * 2


def test_a_sparse_bucket_has_no_windows():
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    bucket = SparseBucket(0, [weight], as_view=False, lends=False)
    assert bucket.views == [] == bucket.views_of(bucket.zeros())
    bucket.take(0, 2)
    assert bucket.flat.is_sparse and bucket.flat.shape == (4, 2) and bucket.flat._nnz() == 0


def test_a_gradient_with_a_graph_is_taken_with_a_warning():
    [parameter] = with_gradients(1, 3)
    parameter.grad = torch.ones(3, requires_grad=True) * 4
    bucket = Bucket(0, [parameter], as_view=False, lends=False)
    with pytest.warns(UserWarning, match=r"backward\(create_graph=True\) with DistributedDataParallel"):
        bucket.take(0, 2)
    bucket.fill(2)
    assert bucket.flat.tolist() == [2.0] * 3 and not bucket.flat.requires_grad
