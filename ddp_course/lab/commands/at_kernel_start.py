"""Each kernel of the lab runs this first, so that a name that is missing is explained at once."""

import ddp_course.lab

del ddp_course
