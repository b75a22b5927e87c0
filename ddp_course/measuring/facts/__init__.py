"""Measurements for figures and to hold the simulator against: published by others, but for `elastic_job`."""

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
    "fsdp_llama3_8b_h100": (
        "Tokens per GPU and second of fully sharded training of Llama 3.1 8B on H100s, 8 per host, 2 sequences of "
        "8,192 tokens each. torchtitan, benchmarks/."
    ),
    "pipeline_schedules_a100": (
        "Samples per GPU and second, and peak memory, of GPT-like models on A100s by pipeline schedule: 1F1B; "
        "interleaved (1F1B-I); zero bubble with the memory of 1F1B (ZB-1p) and twice that (ZB-2p). Qi et al., 'Zero "
        "Bubble Pipeline Parallelism', ICLR 2024 (arXiv 2401.10241), Table 4."
    ),
    "zero3_and_3d_parallel_a100": (
        "TFLOP/s per GPU of ZeRO-3 and of tensor, pipeline and data parallelism together (PTD) on A100s of 80 GB, "
        "8 x 200 Gbit/s per host. Narayanan et al., SC 2021 (arXiv 2104.04473), Table 2."
    ),
    "gpt_step_ms_a100_3d": (
        "Milliseconds per iteration of GPT models on 64 to 512 A100s by tensor, data and pipeline parallelism. "
        "VIA-Research/vTrain (MIT), data/ground_truth_multi.csv."
    ),
    "nccl_ring_a100x8_sizes": (
        "NCCL's all-reduce on 8 A100s of one host, ring forced, microseconds by message. stas00/ml-engineering, "
        "network/README.md (facts from a text under CC BY-SA 4.0)."
    ),
    "nccl_bus_bandwidth_h200_b200": (
        "NCCL's all-reduce on 8 H200s, and on 1 and 4 hosts of 8 B200s, as bus bandwidth: 2(K-1)/K bytes over time, "
        "GB/s. stas00/ml-engineering, network/README.md (facts from a text under CC BY-SA 4.0)."
    ),
    "llama3_interruptions": (
        "Unexpected interruptions of 54 days of training on 16,384 H100s, by cause. 'The Llama 3 Herd of Models' "
        "(arXiv 2407.21783), Table 5."
    ),
    "nccl_log": "NVIDIA/nccl, issue 447, with NCCL_DEBUG=INFO; last two lines: XPixelGroup/BasicSR, issue 737.",
    "elastic_job": "Measured with exercises/clinic/elastic.py: virtual hosts on two cores, 0.1 s per step.",
    "gpipe_throughput": (
        "Throughput of GPipe on TPUs by partitions and micro-batches, over that of 2 partitions and 1 micro-batch. "
        "Huang et al., 'GPipe', NeurIPS 2019 (arXiv 1811.06965), Table 2; the batch was adjusted where memory ran out."
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
