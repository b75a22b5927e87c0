"""What packs functions and results on a machine that has torch and numpy only."""

import importlib
import io
import math
import pickle
import sys

import pytest

from ddp_course.running.launching import pickling


@pytest.fixture
def plain(monkeypatch):
    """The module as it is without cloudpickle."""
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "cloudpickle", None)
        yield importlib.reload(pickling)
    importlib.reload(pickling)


def test_without_cloudpickle_what_modules_define_can_be_sent(plain):
    assert pickle.loads(plain.dumps((math.sqrt, (4,)))) == (math.sqrt, (4,))
    packed = io.BytesIO()
    plain.Pickler(packed, protocol=5).dump({"a": [1.0]})
    assert pickle.loads(packed.getvalue()) == {"a": [1.0]}
    with pytest.raises((pickle.PicklingError, AttributeError)):
        plain.dumps(lambda: 1)


def test_with_cloudpickle_what_a_cell_defines_can_be_sent():
    assert pickle.loads(pickling.dumps(lambda: 3))() == 3
