"""The course's own errors; those of a launch and of what is emulated are in `manyranks/errors.py`."""


class CourseError(Exception):
    """Base of the course's own errors: their message says what was wrong and what to do."""

    def _render_traceback_(self):
        """What a notebook shows: the message alone, without the frames."""
        return [f"{type(self).__name__}: {self}"]


class CheckpointError(CourseError):
    """A checkpoint is missing, damaged, or was made with other options."""
