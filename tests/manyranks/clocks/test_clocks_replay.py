"""Real programs under virtual clocks take the moments of a replay that was written from the
definition.
"""

import pytest
from programs import Setting, draw_program, draw_setting, play_all
from replay import replay

from manyranks import Device, Link, launch

PER_LAUNCH = 29  # One launch has so many programs; 7 launches have 2 to 8 ranks, and 203 programs.
WRONG = [
    "no turns",
    "late ways",
    "by arrival",
    "early collectives",
    "one way",
    "latency last",
    "late posts",
]


def really_run(setting: Setting, programs: list) -> list:
    """Return the moments of all programs, as a replay gives them."""
    link = Link(f"{setting.bandwidth}bit", f"{setting.latency_s}s", setting.hosts)
    device = Device(f"{setting.rate}FLOP/s")
    by_rank = launch(
        play_all, setting, programs, world_size=setting.world_size, device=device, link=link
    )
    results: list = [{} for _ in programs]
    for rank, of_programs in enumerate(by_rank):
        for result, moments in zip(results, of_programs, strict=True):
            result.update({(rank, thread): own for thread, own in moments.items()})
    return results


def programs_of(number: int) -> tuple:
    """Return the setting and the programs of a launch."""
    setting = draw_setting(number)
    first = number * PER_LAUNCH
    return setting, [draw_program(setting, first + place, replay) for place in range(PER_LAUNCH)]


def differences(number: int) -> list[str]:
    """Run the programs of a launch; return where moments or arrivals differ from the replay."""
    different = []
    setting, programs = programs_of(number)
    for place, (steps, real) in enumerate(
        zip(programs, really_run(setting, programs), strict=True)
    ):
        expected = replay(setting, steps)
        for thread, moments in expected.items():
            if moments != real[thread]:
                difference = first_difference(steps[thread], moments, real[thread])
                program = f"program {number * PER_LAUNCH + place}, {setting}"
                different.append(f"{program}, rank and thread {thread}: {difference}")
    return different


def first_difference(steps: list, expected: list, real: list) -> str:
    """Return the first step after which the moments differ, in words."""
    place = next(
        index for index, pair in enumerate(zip(expected, real, strict=True)) if pair[0] != pair[1]
    )
    said = steps[place] if place < len(steps) else "a value"
    return f"after step {place}, {said}: {real[place]}, not {expected[place]}"


@pytest.mark.parametrize("number", range(7))
def test_random_programs_take_the_moments_of_the_replay(number):
    assert not differences(number)


@pytest.mark.weekly
@pytest.mark.parametrize("number", range(7, 35))
def test_many_more_random_programs_take_the_moments_of_the_replay(number):
    assert not differences(number)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_replay_with_a_wrong_rule_differs(wrong):
    """The programs above would show each of these mistakes, several times."""
    different = 0
    for number in range(7):
        setting, programs = programs_of(number)
        different += sum(differs(setting, steps, wrong) for steps in programs)
    assert different >= 10


def differs(setting: Setting, steps: dict, wrong: str) -> bool:
    """Return whether a replay with a wrong rule comes to something else, or never to its end."""
    try:
        return replay(setting, steps) != replay(setting, steps, wrong)
    except AssertionError:
        return True


def test_a_message_takes_what_the_formula_says():
    """Two messages are worked out by hand, so that the replay itself is held against something."""
    setting = Setting(2, 1e9, 1e-6, None, 128e6, ((0, 1),))
    steps = {
        (0, 0): [("compute", 3), ("send", 1, 125, 0, 0), ("send", 1, 125, 0, 0)],
        (1, 0): [("recv", 0, 125, 0, 0), ("recv", 0, 125, 0, 0)],
    }
    moments = replay(setting, steps)
    assert moments == {
        (0, 0): [3_000_000, 7_000_000, 12_000_000],
        (1, 0): [8_000_000, 13_000_000, 0, 0],
    }
