"""A job: frozen, checked, worked out once; what ranks get of it is the settings alone."""

import pickle
from dataclasses import replace

import torch

from ddp_course import Device
from ddp_course.measuring.job import make_job


def test_what_follows_from_a_job_is_worked_out_once():
    job = make_job("digits", 2)
    device = Device("2GFLOP/s")
    assert job.problem is job.problem and job.work(device, 2) is job.work(device, 2)
    assert job.work(device, 2).flops == job.work(device).flops / 2
    assert replace(job, steps=3).problem is not job.problem


def test_ranks_get_the_settings_and_not_the_data():
    job = make_job("bytes", 2, 5, parameters=20_000, dtype="float64")
    assert job.gradient_bytes == 8 * job.parameter_count
    packed = pickle.dumps(job)
    assert len(packed) < 1000 < job.problem.inputs.nbytes
    assert (
        pickle.loads(packed) == job
        and pickle.loads(packed).model().head.weight.dtype == torch.float64
    )
