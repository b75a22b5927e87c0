"""`python -m ddp_course.train` at a tenth of a second a step, until the file that $HURRY names is there."""

import os
import time

from ddp_course import strategies, train

backward = strategies.Replicated.backward


def slowly(self, inputs, targets):
    if not os.path.exists(os.environ["HURRY"]):
        time.sleep(0.1)
    return backward(self, inputs, targets)


strategies.Replicated.backward = slowly
train.main()
