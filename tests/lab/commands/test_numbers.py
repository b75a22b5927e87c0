"""Numbers that cannot be: one parser refuses them for every command, before anything starts."""

import pytest

from ddp_course import problems, train
from ddp_course.base.options import positive_number, whole_number
from ddp_course.lab import cli

WHOLE = "must be a whole number, 1 to 999999999999"
WHOLE_OR_ZERO = "must be a whole number, 0 to 999999999999"
POSITIVE = "must be a positive number"
COMMANDS = {
    "compare": [
        ("--world-size", WHOLE),
        ("--steps", WHOLE),
        ("--global-batch", WHOLE),
        ("--parameters", WHOLE),
        ("--bucket-cap-mb", POSITIVE),
        ("--lr", POSITIVE),
        ("--timeout", POSITIVE),
    ],
    "grade": [("--jobs", WHOLE), ("--timeout", POSITIVE)],
    "train": [
        ("--steps", WHOLE),
        ("--every", WHOLE),
        ("--keep", WHOLE),
        ("--global-batch", WHOLE),
        ("--parameters", WHOLE),
        ("--pipeline", WHOLE),
        ("--tensor", WHOLE),
        ("--lr", POSITIVE),
        ("--timeout", POSITIVE),
        ("--seed", WHOLE_OR_ZERO),
    ],
}
OPTIONS = [(command, *option) for command, options in COMMANDS.items() for option in options]


@pytest.mark.parametrize("command, option, words", OPTIONS)
def test_every_option_with_a_number_refuses_what_cannot_be(command, option, words, capsys):
    texts = ["-5", "nan", "inf", "", "many", "1e400", "99999999999999"]
    if words != WHOLE_OR_ZERO:
        texts.append("0")
    for text in texts:
        arguments = [f"{option}={text}"]
        with pytest.raises(SystemExit) as ended:
            if command == "train":
                train.parse(arguments)
            else:
                cli.main(
                    [command, "1", *arguments]
                    if command in ("check", "grade")
                    else [command, *arguments]
                )
        assert ended.value.code == 2
        assert f'argument {option}: "{text}" {words}' in capsys.readouterr().err


def test_numbers_are_read_as_people_write_them():
    assert [whole_number(text) for text in ("1", " 12 ", "+3", "007")] == [1, 12, 3, 7]
    assert [positive_number(text) for text in ("0.25", "1e-3", " 4")] == [0.25, 0.001, 4.0]


@pytest.mark.parametrize("parameters", [0, -5, 99_999_999_999_999, float("nan")])
def test_no_model_is_made_of_a_size_that_cannot_be(parameters):
    with pytest.raises(ValueError, match="is out of range; choose 65,536"):
        problems.make("synthetic", parameters=parameters)
