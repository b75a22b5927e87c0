"""Numbers that stand in prose, titles and printed lines are those of the outputs they speak of."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = sorted(path.name[:2] for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))


def lesson(number):
    """Return the cells of a lesson."""
    [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    return nbformat.read(path, as_version=4).cells


def prose(number):
    """Return all prose of a lesson on one line."""
    texts = [cell.source for cell in lesson(number) if cell.cell_type == "markdown"]
    return " ".join(" ".join(texts).split())


def printed_in(number):
    """Return all that a lesson shows: printed lines, results, and the messages of figures."""
    texts = []
    for cell in lesson(number):
        for output in cell.get("outputs", []):
            texts.append(output.get("text", ""))
            texts.append(output.get("data", {}).get("text/plain", ""))
    return " ".join(" ".join(texts).split())


def code(number):
    return "\n".join(cell.source for cell in lesson(number) if cell.cell_type == "code")


def numbers(pattern, text):
    """Return the groups of the first match, as numbers."""
    found = re.search(pattern, text)
    assert found, f"nowhere: {pattern}"
    return [float(group.replace(",", "").replace("−", "-")) for group in found.groups()]


class Said(NamedTuple):
    """What a lesson says and what it shows, as patterns.

    The number that is said follows from those that are shown; the two may be apart by a share.
    """

    lesson: str
    says: str
    shows: str
    follows: Callable[..., float]
    apart: float


def same(value, *_):
    return value


def ratio(first, second):
    return first / second


def inverse(first, second):
    return second / first


N = r"([-+−]?[\d,]*\.?\d+)"
RUN = f"two functions {N} tokens/s per GPU, the whole model {N} .*?measured {N}"
BUCKETS = rf"{N} \(buckets\) times"
SAID = [
    Said("00", BUCKETS, f"5 bucketed DDP {N} {N} {N}", lambda *row: row[2], 0.03),
    Said("00", f"bucketed DDP is {N} times", BUCKETS, same, 0.05),
    Said("00", rf"The answer: {N} times \(virtual", BUCKETS, same, 0.03),
    Said("01", f"backward takes {N} times", f"forward {N} ms, backward {N} ms", inverse, 0.05),
    Said("05", f"backward take {N} ms", f"stage 4: {N} ms per step", lambda ms: ms - 134.0, 0.02),
    Said("05", f"with buckets: {N} ms", f"buckets: 4, step {N} ms", same, 0.01),
    Said(
        "09", f"Activations: {N} times", f"activations {N} MB, everything else {N} MB", ratio, 0.05
    ),
    Said("11", f"costs all ranks {N} to", f"host 1 is lost: no step for {N} s", same, 0.05),
    Said("12", f"Two levels take {N} of", f"= {N} p for 4 ranks", lambda p: 1 / p, 0.02),
    Said("13", f"three ways were {N} times", f"The answer: {N} against {N} Tflop/s", ratio, 0.03),
    Said("13", rf"two functions \+{N}%", RUN, lambda two, _, real: 100 * (two / real - 1), 0.05),
    Said("13", f"model {N}%", RUN, lambda _, whole, real: 100 * (whole / real - 1), 0.3),
    Said("15", f"= {N} ms predicted", f"computing {N} ms . all-reduce {N} ms", float.__add__, 0.05),
]


@pytest.mark.parametrize("said", SAID, ids=lambda said: f"{said.lesson}: {said.says[:20]}")
def test_a_number_is_that_of_the_output_it_speaks_of(said):
    everything = f"{prose(said.lesson)} {printed_in(said.lesson)}"
    [number, *_] = numbers(said.says, everything)
    values = numbers(said.shows, everything)
    assert number == pytest.approx(said.follows(*values), rel=said.apart), values


def test_a_third_of_the_rings_step_is_sending():
    [step, _, _, sending] = numbers(f"4 ring {N} {N} {N} {N}", printed_in("00"))
    assert "a third of its step on sending" in prose("00")
    assert sending / step == pytest.approx(1 / 3, rel=0.1)


def test_the_trace_is_spoken_of_as_it_is():
    """Lessons 05, 06 and 11 say in words what the trace of the A100s shows."""
    for number in ("05", "11"):
        computing, step = numbers(rf"computes for {N} of {N} ms", printed_in(number))
        text = prose(number)
        assert f"{step:.0f} ms" in text, number
        assert f"{computing:.0f}" in text, number
    after, first = numbers(
        rf"of which {N} after backward .*?first long kernel {N} ms", printed_in("11")
    )
    assert f"delays the step by {after:.0f} ms" in prose("11")
    assert f"the first {first:.0f} ms of forward" in prose("11")


CORES = {
    "06": ("core", "core-unused", "core-quiet"),
    "07": ("shard", "zero", "fully-sharded", "hooks"),
}


@pytest.mark.parametrize("number", CORES)
def test_the_lines_that_a_lesson_counts_are_there(number):
    """Lessons 06 and 07 say how many lines their core has."""
    sources = {cell.id: cell.source for cell in lesson(number)}
    lines = []
    for name in CORES[number]:
        lines += [line for line in sources[name].splitlines() if line.strip()]
    said = [int(count) for count in re.findall(r"(\d\d) lines", prose(number))]
    assert any(abs(count - len(lines)) <= 8 for count in said), (said, len(lines))


@pytest.mark.parametrize("number", NUMBERS)
def test_links_are_those_of_the_code(number):
    """Every link that the prose of an experiment names occurs in the code of its lesson."""
    text = prose(number).split("## Check yourself")[0]
    for speed, unit in re.findall(r"(?:links? of|links\*\* of|inside and) (\d+) ([MG])bit/s", text):
        power = {"M": 6, "G": 9}[unit]
        spellings = (f'"{speed}{unit}bit"', f"{speed}e{power}")
        assert any(spelling in code(number) for spelling in spellings), f"{speed} {unit}bit/s"


def test_ranks_are_as_many_in_all_lessons():
    for number in NUMBERS:
        found = re.findall(r"^K = (\d+)", code(number), re.MULTILINE)
        usual = {"15": "2", "01": "", "13": ""}.get(number, "4")
        assert "".join(found) in (usual, ""), (number, found)


def test_the_same_setting_gives_the_same_numbers():
    """Lessons 03 and 04 average the same bytes over the same links; 00 and README show one run."""
    for spelling in ('Link("200Mbit")', "2**20"):
        assert spelling in code("03")
        assert spelling in code("04")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = f"makes 4 devices {N} times as fast as one, a ring {N} times, buckets {N} times"
    drawn = rf"{N} \(server\), {N} \(ring\), {N} \(buckets\) times"
    assert numbers(said, readme) == numbers(drawn, printed_in("00"))


def test_no_stored_output_says_that_nobody_guessed():
    for number in NUMBERS:
        assert "did not guess" not in printed_in(number)


def test_the_hours_of_the_course_are_the_sum_of_its_minutes():
    """Lesson 00 says how long all takes: the minutes of all lessons and of all tasks."""
    minutes = 0
    for number in NUMBERS:
        for spent in re.findall(r"\*(\d+) minutes, |takes (\d+) more", prose(number)):
            minutes += int(spent[0] or spent[1])
    for path in (ROOT / "exercises").glob("*.ipynb"):
        minutes += sum(map(int, re.findall(r"\*(\d+) minutes · ", path.read_text("utf-8"))))
    [hours] = numbers(f"at a time, about {N} hours", prose("00"))
    assert hours == pytest.approx(minutes / 60, abs=0.5), minutes / 60
