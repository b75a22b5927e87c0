"""A job: frozen, checked, worked out once; what ranks get of it is the settings alone."""

import pickle
from dataclasses import replace

import pytest
import torch

from ddp_course import Device
from ddp_course.job import make_job


def test_what_follows_from_a_job_is_worked_out_once():
    job = make_job("digits", 2)
    device = Device("2GFLOP/s")
    assert job.problem is job.problem
    assert job.work(device, 2) is job.work(device, 2)
    assert job.work(device, 2).flops == job.work(device).flops / 2
    assert replace(job, steps=3).problem is not job.problem


def test_the_profile_of_a_step_has_the_seconds_of_its_operations_and_no_others():
    work = make_job("digits", 2).work(Device("2GFLOP/s"))
    assert work.compute_s == pytest.approx(work.flops / 2e9)


@pytest.mark.parametrize("ranks, samples", [(1, 192), (5, 190), (192, 192), (200, 200)])
def test_the_batch_is_the_problems_or_the_next_that_ranks_can_share(ranks, samples):
    assert make_job("digits", ranks).global_batch == samples


def test_ranks_get_the_settings_and_not_the_data():
    job = make_job("bytes", 2, 5, parameters=20_000, dtype="float64")
    assert job.gradient_bytes == 8 * job.parameter_count
    packed = pickle.dumps(job)
    assert len(packed) < 1000 < job.problem.inputs.nbytes
    assert pickle.loads(packed) == job
    assert pickle.loads(packed).model().head.weight.dtype == torch.float64
