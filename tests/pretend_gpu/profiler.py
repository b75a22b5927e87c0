"""A trace of torch's profiler as it would be with GPUs.

It has a kernel for each operation that launches one, and NCCL's for each collective. Their times
are the processor's.
"""

import json

import torch

NAMES = {"allreduce_": "allreduce"}  # of collectives, in c10d and in NCCL's kernels


def exported(original):
    """`export_chrome_trace`, with kernels."""

    def export_chrome_trace(self, path):
        original(self, path)
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
        events = trace["traceEvents"]
        for number, event in enumerate([each for each in events if each.get("cat") == "cpu_op"]):
            events += launched(event, number)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace, file)

    return export_chrome_trace


def launched(event, number):
    """Return the launch of a kernel and the kernel, for an operation of the processor."""
    space, _, name = event["name"].partition("::")
    args = {"correlation": number}
    kernel = f"pretended_{name}"
    if space == "c10d":
        kernel = f"ncclDevKernel_{name}"
        args |= {"Collective name": NAMES.get(name, name), "In msg nelems": 1}
    elif space != "aten":
        return []
    when = {"ph": "X", "ts": event["ts"], "dur": event["dur"], "pid": 0, "tid": 7}
    launch = {**when, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": args}
    return [launch, {**when, "cat": "kernel", "name": kernel, "args": args}]


def install():
    """Put this in the place of torch's."""
    kind = torch.profiler.profile
    kind.export_chrome_trace = exported(kind.export_chrome_trace)
