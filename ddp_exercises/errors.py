"""The errors of answers to exercises, and of the notebooks with these answers."""

from ddp_course.base.errors import CourseError


class Wrong(CourseError):
    """An answer to an exercise is wrong; the message tells the learner what is wrong with it."""


class TooSlow(BaseException):
    """An answer or a cell has used up its time; `except Exception` does not catch this error."""


class GradingError(CourseError, ValueError):
    """A notebook cannot be graded: it is damaged, or not one of the course's exercises."""
