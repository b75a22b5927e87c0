"""`python -m ddp_course.train` at $PAUSE seconds a step (default 0.1), until the file that $HURRY names is there."""

import os
import time

from ddp_course import train, wrapping

PAUSE = float(os.environ.get("PAUSE", "0.1"))
backward = wrapping.Replicated.backward


def slowly(self, inputs, targets):
    if not os.path.exists(os.environ["HURRY"]):
        time.sleep(PAUSE)
    return backward(self, inputs, targets)


wrapping.Replicated.backward = slowly
train.main()
