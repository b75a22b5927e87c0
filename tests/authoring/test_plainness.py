"""Each rule of plain code finds its break, and leaves alone what is meant."""

import plainness
import pytest

PAIR = "class Pair(NamedTuple):\n    x: int"
BROKEN = {
    "first, second = 1, 2": "one assignment a line",
    "self.a, b = {}, None": "one assignment a line",
    "rows = [[cell for cell in row] for row in table]": "inside a comprehension",
    "total = sum(sum(x for x in row) for row in rows)": "inside a comprehension",
    "pair = [a if b else c, d]": "a conditional expression inside",
    "total = 1 + (a if b else c)": "a conditional expression inside",
    "for size in range(3) if many else (): pass": "a conditional expression inside",
    "words = 'of which some are frozen' * frozen": "a boolean as a number",
    "count = 1 + (ranks > 5)": "a boolean as a number",
    "for x in [y]: pass": "a loop over one element",
    "last = [end for end in ends[-1:]]": "a loop over one element",
    "for _ in 'ab': pass": "letters that are not used",
    "fives = zip(*[iter(pieces)] * 5)": "one iterator many times",
    f"{PAIR}\n    def y(self):\n        return self[0]": "the field's name",
    f"{PAIR}\ndef f(p: Pair):\n    return p[0]": "the field's name",
    "value = f(1)  # fmt: skip": "without a table of data",
    "first(\n    0\n)()  # why": "a comment breaks a bracket",
    "if (\n    a == b\n):  # why\n    pass": "a comment breaks a bracket",
    "value: (\n    bool  # why\n)": "a comment breaks a bracket",
    "f(\n    # why\n    1\n)": "a comment breaks a bracket",
}
PLAIN = [
    "a, b = b, a",
    "a, b = b, a + b",
    "first, second = pair",
    "names = [cell for row in table for cell in row]",
    "size = 1 if small else 2",
    "f(1 if small else 2, key=3 if small else 4)",
    "def f():\n    return 1 if small else 2",
    "line = '-' * width",
    "mask = a > b",
    "for x in [*some]: pass",
    "for place, x in enumerate(y[1:]): pass",
    "for letter in 'ab': print(letter)",
    "def f(p: list):\n    return p[0]",
    "f(\n    1,  # why\n    2,\n)",
    f"f(\n    {'a' * 60},\n    {'b' * 60}  # why\n)",
    "f(\n    1\n)\nvalue = 2  # why",
    "table = [\n    [1, 2],\n    [3, 4],\n]  # fmt: skip",
]


@pytest.mark.parametrize("source, words", BROKEN.items())
def test_a_break_of_a_rule_is_found(source, words):
    (found,) = plainness.breaks(source, "a.py")
    assert words in found.rule
    assert str(found).startswith(f"a.py:{found.line}: ")


@pytest.mark.parametrize("source", PLAIN)
def test_plain_code_is_left_alone(source):
    assert not plainness.breaks(source)


def test_each_break_is_printed_with_its_place(tmp_path, monkeypatch, capsys):
    room = tmp_path / "ddp_course"
    room.mkdir()
    (room / "dense.py").write_text("first, second = 1, 2\n")
    (room / "plain.py").write_text("first = 1\n")
    monkeypatch.setattr(plainness, "ROOT", tmp_path)
    monkeypatch.setattr(plainness, "files", lambda: sorted(room.glob("*.py")))
    assert plainness.main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ddp_course/dense.py:1: one assignment")
    (room / "dense.py").unlink()
    assert plainness.main([]) == 0
