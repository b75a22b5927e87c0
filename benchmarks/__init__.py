"""Speed, as ratios measured side by side in one run: `make bench NAME`, or `python -m benchmarks
NAME --help`.
"""

BENCHMARKS = (
    "launch",
    "links",
    "ring",
    "ddp",
    "sharded",
    "simulator",
    "devices",
    "grade",
    "gpu",
    "predictions",
    "rehearsals",
    "virtual_time",
)
