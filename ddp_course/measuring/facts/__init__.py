"""Measurements that others have published, for figures and to hold the simulator against."""

import csv
from importlib.resources import files
from typing import Any

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
    "nccl_all_reduce_in_one_host": (
        "NCCL's all-reduce in place on the A100s or V100s of one host, microseconds by message. Traces of the public "
        "repository VIA-Research/vTrain (MIT), trace/a100 and trace/v100."
    ),
    "published_scaling": (
        "Throughput a device against that on fewer devices. OPT-350M: global batch 1,024, 1.926 s an iteration on 16 "
        "and 1.026 s on 32 (eth-easl/sailor, MIT). Llama 3.1 8B: 5,762 and 5,605 tokens a second (torchtitan, "
        "benchmarks/). ResNet-101 and VGG-16: Horovod, docs/benchmarks.rst."
    ),
}


def rows(name: str) -> list[dict[str, Any]]:
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
