"""The pictures of an iteration stand in their lessons, with the words that are their text.

They say with lesson 00 what makes each stage possible.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

import drawings
import pytest

LESSONS = Path(__file__).parents[2] / "authoring" / "lessons"
SVG = "{http://www.w3.org/2000/svg}"


def source(number):
    [path] = [
        path for path in LESSONS.glob(f"{number:02}_*.py") if not path.stem.endswith("_exercise")
    ]
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", drawings.ITERATIONS)
def test_a_lesson_has_its_iteration_and_describes_it(number):
    drawn = drawings.ITERATIONS[number]
    picture = ElementTree.fromstring(drawings.iterations()[f"iteration_{number:02}.svg"])
    assert picture.findtext(f"{SVG}title") == drawn.title
    description = picture.findtext(f"{SVG}desc")
    assert description == drawn.description
    shown = f"![{description.rstrip('.')}](../docs/figures/iteration_{number:02}.svg)"
    assert source(number).count(shown) == 1


@pytest.mark.parametrize("number", drawings.ITERATIONS)
def test_all_of_a_picture_lies_inside_it(number):
    picture = ElementTree.fromstring(drawings.iterations()[f"iteration_{number:02}.svg"])
    for box in picture.iter(f"{SVG}rect"):
        right = float(box.get("x", 0)) + float(box.get("width"))
        bottom = float(box.get("y", 0)) + float(box.get("height"))
        assert right <= drawings.WIDTH
        assert bottom <= drawings.HEIGHT


def test_every_picture_marks_what_is_new():
    for name, text in drawings.iterations().items():
        boxes = ElementTree.fromstring(text).findall(f"{SVG}rect")[1:-1]
        new = [box for box in boxes if box.get("stroke") == drawings.NEW]
        assert new, name


@pytest.mark.parametrize("number", range(1, 10))
def test_lesson_and_map_say_the_same_property(number):
    """What makes a stage possible is one line of its lesson, and a cell of lesson 00's table."""
    [said] = re.findall(r"^\*\*Possible because\*\* (.+)\.$", source(number), re.M)
    [row] = re.findall(rf"^\| {number:02} \|.*\| ([^|]+) \|$", source(0), re.M)
    assert said == row
