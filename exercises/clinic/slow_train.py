"""`python -m ddp_course.train` at $PAUSE seconds a step (default 0.1), until the file that $HURRY names is there."""

import os
import time

from ddp_course import problems, train

PAUSE = float(os.environ.get("PAUSE", "0.1"))
batches = problems.Problem.batches


def slow_batches(self, *arguments, **named):
    for batch in batches(self, *arguments, **named):
        if not os.path.exists(os.environ["HURRY"]):
            time.sleep(PAUSE)
        yield batch


problems.Problem.batches = slow_batches
train.main()
