"""tqdm's progress bar, but it ends full or goes, and readers without widgets see nothing of it."""

from typing import Any

from tqdm.auto import tqdm

IN_NOTEBOOK = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
VIEW = "application/vnd.jupyter.widget-view+json"


class DrawnBar(tqdm):
    """A bar around a loop, which ends full, or goes when the loop ends early.

    tqdm's own bar would stay in a notebook, in red, even where nothing failed. What it stores as
    text, for readers without widgets, would stand at 0 % for ever.
    """

    total: float | None
    leave: bool | None

    def __init__(self, *args: Any, **options: Any):
        if IN_NOTEBOOK:
            options["display"] = False
        super().__init__(*args, **options)
        if IN_NOTEBOOK and not self.disable:
            from IPython.display import display

            shown = {"version_major": 2, "version_minor": 0, "model_id": self.container.model_id}
            display({VIEW: shown, "text/plain": ""}, raw=True)

    def close(self) -> None:
        """End the bar, and remove it if it is not full or was not to stay.

        In a notebook its widget is hidden: a closed one would be an error when the page is
        reopened.
        """
        cut_short = self.total and self.n < self.total
        if not self.disable and (cut_short or not self.leave):
            if cut_short:
                self.total = self.n  # Otherwise it would be red.
            self.leave = IN_NOTEBOOK
            if IN_NOTEBOOK:
                self.container.layout.display = "none"
        super().close()
