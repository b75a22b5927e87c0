"""The course's own errors; those of launches are in `manyranks/errors.py`."""


class CourseError(Exception):
    """The base of the course's own errors, whose messages say what was wrong and what to do."""

    def _render_traceback_(self):
        """Return what a notebook shows: the message alone, without the frames."""
        return [f"{type(self).__name__}: {self}"]


class CheckpointError(CourseError):
    """A checkpoint is missing, damaged, or was made with other options."""
