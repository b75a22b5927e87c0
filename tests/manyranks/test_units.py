"""Numbers with units, as people write them."""

import pytest

from manyranks import units


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.bits_per_second, "200Mbit", 2e8),
        (units.bits_per_second, "3.6Tbit", 3.6e12),
        (units.bits_per_second, "1.5 Gbit/s", 1.5e9),
        (units.seconds, "5ms", 5e-3),
        (units.seconds, "10µs", 1e-5),
        (units.seconds, "0s", 0),
        (units.bytes_per_second, "5GB/s", 5e9),
    ],
)
def test_units_are_read(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (units.bits_per_second, "200", "write it like 200Mbit"),
        (units.bits_per_second, "200MB", 'the bandwidth "200MB"'),
        (units.bits_per_second, "0Mbit", "more than zero"),
        (units.bits_per_second, "1..5Mbit", "cannot read"),
        (units.bits_per_second, "1e400Mbit", "out of range"),
        (units.seconds, "5", "write it like 5ms"),
        (units.seconds, "-5ms", "-5ms"),
    ],
)
def test_nonsense_is_refused_with_an_example(parse, text, words):
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        parse(text)
