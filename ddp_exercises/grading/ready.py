"""Loads what kernels and ranks of a grading need, once, in the process from which they are forked.

The grader itself does not import this: progress bars would take it for a notebook.
"""

import sys

from ipykernel.inprocess import ipkernel as ipkernel

from ddp_exercises import tasks

from . import run_cells as run_cells
from . import watched as watched

# Checks that were loaded before belong to tasks of an earlier text of this package.
for name in list(sys.modules):
    if name.startswith("exercise_checks"):
        del sys.modules[name]
# Numbers of exercises have two digits.
for exercise in range(100):
    tasks.load_tasks(exercise)
