"""Every package has a weight and every room a density, and what is beyond a limit is noticed."""

import functools

import pytest
import weights


@pytest.fixture(autouse=True, scope="module")
def counted_once():
    """The rooms do not change between these tests, and to count them takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "rooms", functools.cache(weights.rooms))
        yield


def test_code_counts_and_words_do_not():
    plain = weights.measure('"""Say what."""\n\nx = 1  # so much\n')
    assert plain == {"nodes": 7, "code": 1, "comments": 1}
    assert weights.measure("x = (\n    1\n)\n")["nodes"] == weights.measure("x = 1\n")["nodes"]


def test_a_package_beyond_its_weight_fails(monkeypatch, capsys):
    assert weights.main() == 0
    monkeypatch.setitem(weights.PACKAGES, "ddp_exercises", 100)
    assert weights.main() == 1
    assert "TOO HEAVY" in capsys.readouterr().out


def test_a_room_of_dense_lines_fails(monkeypatch, capsys):
    monkeypatch.setattr(weights, "DENSEST", 5.0)
    assert weights.main() == 1
    assert "more than 5.0 per line" in capsys.readouterr().out
