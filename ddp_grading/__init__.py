"""Grading folders of exercises: what only a teacher uses.

A learner's `check` is in `ddp_course.checking`. Four modules grade a submission. `submissions`
finds and reads the notebook, and puts its cells, unchanged, into the pristine notebook with the
course's own check cells. `run_cells` runs the result under nbval; its check cells write down the
answers that they are given. `grader` gathers the evidence and the verdicts of
`ddp_course.checking`, and adds up the points (`results`). `report` and `gradebooks` write them.
There are three kinds of processes: the grader, where nothing of a submission ever runs; nbval with
the notebook's kernel; and the ranks. The last two are under the limits of
`ddp_course.checking.guard`.
"""
