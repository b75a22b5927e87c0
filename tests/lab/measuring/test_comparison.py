"""A comparison in virtual time has the same bits on any machine, and in any order of threads."""

import pytest

from benchmarks.virtual_time import digest
from ddp_course.lab.measuring import comparison
from manyranks import Device

# the SHA-256 of a comparison's JSON on any machine
SMALL_RUN = "d431cc50d9e1b3a7be8db091bffcf08dae1dc04b969945f2b0ba281498fd2727"


@pytest.mark.parametrize("fuzz", ["", "2"])
def test_the_same_bits_on_any_machine(fuzz, monkeypatch):
    monkeypatch.setenv("MANYRANKS_FUZZ", fuzz)
    results = comparison.run(
        "digits", 2, 3, "1,3,4,5,9,torch", device=Device("2.4GFLOP/s"), link="100Mbit"
    )
    assert digest(results) == SMALL_RUN
