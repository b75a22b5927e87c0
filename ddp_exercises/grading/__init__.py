"""Grades folders of exercises, which only a teacher does.

A learner's `check` is in `ddp_exercises`. `people` says whose a notebook is, and
`submissions` finds and reads all of them, and puts a learner's cells, unchanged, among the cells of
the exercise as given out. `run_cells` runs them in a kernel; its check cells hand over the answers
that they are given. `grader` gathers the evidence and the verdicts of `ddp_exercises`, and
adds up the points (`results`); `comments` adds a teacher's. `report` and `gradebooks` write them.
There are three kinds of processes: the grader, where nothing of a submission ever runs; the kernel,
below a rank that watches it; and the ranks that try answers. The kernel and these ranks are under
the limits of `guard`, inside a fence of `landlock`.
"""

from manyranks import own_code

own_code.register(__name__, __path__[0], ["ready"])
