"""Speed, as ratios measured side by side in one run: `make bench NAME`.

`python -m benchmarks NAME --help` shows the options.
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
