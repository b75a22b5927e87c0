"""Give every process its pretended GPUs when torch has been imported.

Python imports this at the start of every process.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[2])


class AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as everybody else would, and adds the GPUs once torch has been executed."""

    def find_spec(self, name, path, target=None):
        """Return the usual spec of torch, with this loader around the usual one."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        """Return the usual module."""
        return self.loader.create_module(spec)

    def exec_module(self, module):
        """Execute torch, and then install the GPUs."""
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        sys.path.insert(0, TESTS)
        try:
            import pretend_gpu.install

            pretend_gpu.install.install()
        finally:
            sys.path.remove(TESTS)


if int(os.environ.get("PRETEND_GPUS") or 0):
    sys.meta_path.insert(0, AfterTorch())
