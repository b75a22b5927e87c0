"""On the path of a process, this hides all that the library must do without."""

import sys

HIDDEN = ("ddp_course", "ddp_exercises", "ddp_predictions", "jupyterlab", "matplotlib", "sklearn")


class Hiding:
    """A finder that finds what another one finds, but for what is hidden."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        """Return what else a finder does, such as to find what is installed in which version."""
        return getattr(self.finder, name)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
