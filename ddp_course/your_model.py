"""A learner's own model, data, loss and optimizer: `compare --model FILE.py:FUNCTION` takes them.

The function returns a dict of them; docs/YOUR_MODEL.md has one.
"""

import copy
import difflib
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from manyranks.torch_inside import tree_map_only

from .problems import Batch, Problem

NEEDED = {"model", "data"}
PARTS = {*NEEDED, "loss", "optimizer"}  # What the function may return.


class YourModel:
    """The function that makes the model: itself, or as "FILE.py:FUNCTION".

    The file is read once, so that all ranks get the same text. Two are never equal: what was
    measured of one says nothing about the next, which may be made of other code.
    """

    def __init__(self, source: str | Callable[[], Any]):
        self.text = None
        if callable(source):
            self.function = source
            self.name = getattr(source, "__name__", str(source))
            self.file = getattr(getattr(source, "__code__", None), "co_filename", "")
            return
        path, _, self.name = source.rpartition(":")
        if not path.endswith(".py") or not self.name.isidentifier():
            raise ValueError(f'"{source}" must be FILE.py:FUNCTION, such as mine.py:make')
        file = Path(path).expanduser().resolve()
        self.file = str(file)
        try:
            self.text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise ValueError(f'cannot read "{path}" in {Path.cwd()}: {reason}') from error

    def __str__(self):
        return f"{Path(self.file).name}:{self.name}" if self.text is not None else self.name

    def make(self) -> dict[str, Any]:
        """What the function returns, checked. Raises ValueError, which says what is wrong."""
        with torch.random.fork_rng(devices=[]):
            # Every rank makes the same.
            torch.default_generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            try:
                function = self.function if self.text is None else self.find()
                made = function()
            except (Exception, SystemExit) as error:
                raise ValueError(self.in_words(error)) from error
        return self.checked(made)

    def find(self) -> Callable[[], Any]:
        """Run the file, and return its function. Raises ValueError if it has none of this name."""
        folder = str(Path(self.file).parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # As in a script, the files beside it can be imported.
        module = ModuleType(f"your_{Path(self.file).stem}")
        module.__file__ = self.file
        sys.modules[module.__name__] = module
        exec(compile(str(self.text), self.file, "exec"), module.__dict__)
        functions = [name for name, value in vars(module).items() if callable(value)]
        if self.name not in functions:
            own = [name for name in functions if vars(module)[name].__module__ == module.__name__]
            similar = difflib.get_close_matches(self.name, own, n=1) or own
            there = f"; it has {', '.join(similar)}" if similar else ""
            raise ValueError(f"no function {self.name} is there{there}")
        return vars(module)[self.name]

    def in_words(self, error: BaseException) -> str:
        """An error in this code in one line: the file, the line, and what is wrong there."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == self.file]
        message = str(error).strip().partition("\n")[0]
        if isinstance(error, SyntaxError) and error.filename == self.file:
            lines.append(error.lineno)
            message = error.msg
        where = f"{self}, line {lines[-1]}" if lines else str(self)
        if isinstance(error, SystemExit):
            return f'{where} ends the program; what is to run alone goes below if __name__ == "…"'
        if type(error) is ValueError and not lines:
            return f"{where}: {message}"
        return f"{where}: {type(error).__name__}: {message}"

    def checked(self, made: Any) -> dict[str, Any]:
        """The dict that the function returned. Raises ValueError if it is not what it must be."""
        if not isinstance(made, dict):
            made = {type(made).__name__: made}
        if made.keys() - PARTS or NEEDED - made.keys():
            raise ValueError(
                f"{self} must return a dict with model and data, and perhaps loss and optimizer,"
                f" and returned: {', '.join(map(str, made)) or 'an empty one'}"
            )
        data = made["data"]
        if isinstance(data, (tuple, list)) and all(isinstance(each, Tensor) for each in data):
            lengths = {len(each) for each in data}
            if len(data) != 2 or len(lengths) != 1:
                raise ValueError(f"{self}: data must be (inputs, targets), as many of each")
            data = TensorDataset(*data)
        kinds: list[tuple[bool, str, str]] = [
            (isinstance(made["model"], nn.Module), "model", "a torch.nn.Module"),
            (hasattr(data, "__getitem__") and hasattr(data, "__len__"), "data", DATA),
            (callable(made.get("loss", len)), "loss", "a function of (outputs, targets)"),
            (callable(made.get("optimizer", len)), "optimizer", "a class such as torch.optim.SGD"),
        ]
        for right, part, wanted in kinds:
            if not right:
                found = type(made[part]).__name__
                raise ValueError(f"{self}: {part} is of type {found}; it must be {wanted}")
        return {**made, "data": data}


DATA = "two tensors (inputs, targets), or a data set with a length and samples (input, target)"


class YourProblem(Problem):
    """A problem made by a `YourModel`; no sample is held out."""

    learning_rate = 0.05
    steps = 20

    def __init__(
        self, source: YourModel, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        made = source.make()
        self.source = source
        self.name = str(source)
        self.made_model = made["model"]
        self.data = made["data"]
        self.targets = range(len(self.data))  # Only their number is asked for.
        self.global_batch = min(64, max(1, len(self.data)))
        self.training_loss = made.get("loss", Problem.training_loss)
        self.optimizer = made.get("optimizer", Problem.optimizer)
        self.dtype = dtype
        self.device = device

    def model(self, seed: int = 0) -> nn.Module:
        """Return a copy of the model, which was made once."""
        return copy.deepcopy(self.made_model).to(self.device, self.dtype)

    def pick(self, indices: Tensor) -> Batch:
        """Return the (inputs, targets) of the samples with these indices, on the device."""
        batch = default_collate([self.data[index] for index in indices.tolist()])
        inputs, targets = tree_map_only(Tensor, self.ready, batch)
        return inputs, targets

    def ready(self, value: Tensor) -> Tensor:
        """Return a tensor on the device, floating-point numbers in the problem's type."""
        return value.to(self.device, self.dtype if value.is_floating_point() else None)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return no measure, since nothing is held out."""
        return {}

    def try_step(self, indices: Tensor, lr: float) -> None:
        """Train one step. Raises ValueError that says in one line what cannot work."""
        try:
            inputs, targets = self.pick(indices)
            must_be_a_tensor("an input", inputs)
            model = self.model()
            outputs = model(inputs)
            must_be_a_tensor("what the model returns", outputs)
            loss = self.training_loss(outputs, targets)
            if not isinstance(loss, Tensor) or loss.dim():
                shape = tuple(loss.shape) if isinstance(loss, Tensor) else repr(loss)
                raise ValueError(f"the loss must be a tensor with one number, and is {shape:.40}")
            loss.backward()
            self.optimizer(model.parameters(), lr=lr).step()
        except Exception as error:
            words = self.source.in_words(error)
            where = f"in a first step on {len(indices)} samples; docs/YOUR_MODEL.md has an example"
            raise ValueError(f"{words} ({where})") from error


def must_be_a_tensor(what: str, value: Any) -> None:
    """Raise ValueError unless the stages can cut it into shares and put these together again."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} must be one tensor, and is a {type(value).__name__}")
