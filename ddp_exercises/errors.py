"""What goes wrong with answers to exercises, and with the notebooks that they are in."""

from ddp_course.errors import CourseError


class Wrong(CourseError):
    """An answer to an exercise is wrong.

    The message says what about it, in words for the learner.
    """


class TooSlow(BaseException):
    """Raised in an answer or a cell that has used up its time; `except Exception` lets it pass."""


class GradingError(CourseError, ValueError):
    """A notebook cannot be graded: it is damaged, or not one of the course's exercises."""
