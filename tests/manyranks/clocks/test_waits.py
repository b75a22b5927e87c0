"""docs/VIRTUAL_TIME.md says of everything that can wait how it waits; so a new one is noticed."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import waits

PAGE = Path(__file__).parents[3] / "docs" / "VIRTUAL_TIME.md"
KINDS = ("By the clock", "In real time", "Refused by name")


def listed():
    """Return the patterns of each list on the page."""
    page = PAGE.read_text(encoding="utf-8").split("## All by which a thread waits")[1]
    lists = {}
    for paragraph in page.split("\n\n## ")[0].split("\n\n"):
        for kind in KINDS:
            if paragraph.startswith(f"**{kind}"):
                lists[kind] = re.findall(r"`([\w.*]+)`", paragraph)
    return lists


def kinds_of(name, lists):
    """Return the most exact patterns that a name matches, as the kinds of their lists."""
    lengths = {}
    for kind, patterns in lists.items():
        for pattern in patterns:
            if fnmatchcase(name, pattern):
                lengths[kind] = max(lengths.get(kind, 0), len(pattern))
    return [kind for kind, length in lengths.items() if length == max(lengths.values())]


def test_everything_that_can_wait_is_in_one_list():
    lists = listed()
    assert set(lists) == set(KINDS)
    names = [name for module in waits.MODULES for name in waits.waits_of(module)]
    assert len(names) > 150
    for name in names:
        assert len(kinds_of(name, lists)) == 1, f"{name} is in {kinds_of(name, lists)}"


def test_what_is_in_no_list_would_be_noticed():
    assert kinds_of("telepathy.wait", listed()) == []
    assert "time.sleep" in waits.waits_of("time")
    assert "threading.Thread.join" in waits.waits_of("threading")
    assert "torch.distributed.Work.wait" in waits.waits_of("torch.distributed")


def test_no_list_has_a_module_that_is_not_looked_through():
    for patterns in listed().values():
        for pattern in patterns:
            if "." in pattern:
                assert any(pattern.startswith(f"{module}.") for module in waits.MODULES), pattern
