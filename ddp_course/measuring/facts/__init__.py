"""Measurements that others have published, for figures and to hold the simulator against."""

import csv
from importlib.resources import files

SOURCES = {
    "allreduce_on_shaped_links": (
        "All-reduce of 128 MiB with gloo and NCCL (torch 1.9) on cloud nodes whose links were shaped with Linux tc and "
        "netem; one-way delays. Results of the public repository BinhangYuan/tc_cluster_setting."
    ),
    "ddp_step_seconds_v100": (
        "Median seconds per iteration of torch's DDP with NCCL, 32 pictures a GPU, V100, 4 x 100 Gbit/s InfiniBand, "
        "torch 1.4. benchmarks/distributed/ddp/README.md of pytorch/pytorch."
    ),
    "imagenet_large_batch": (
        "ResNet-50's top-1 error by global batch, with linear scaling and gradual warm-up. Goyal et al., 'Accurate, "
        "Large Minibatch SGD: Training ImageNet in 1 Hour', 2017."
    ),
}


def rows(name):
    """The lines of table `name` (a key of SOURCES) as a list of dicts, numbers as floats; ValueError if unknown."""
    if name not in SOURCES:
        raise ValueError(f'there is no table "{name}"; choose one of {", ".join(SOURCES)}')
    with (files(__package__) / f"{name}.csv").open(encoding="utf-8") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(text):
    try:
        return float(text)
    except ValueError:
        return text
