"""Parses the numbers that options of commands are given, and refuses others in words."""

import math
import re
from argparse import ArgumentTypeError


def whole_number(text: str, least: int = 1) -> int:
    """Parse a whole number that an option of a command is given.

    Raises ArgumentTypeError for other text; the command adds the option's name.
    """
    if not re.fullmatch(r"\s*\+?[0-9]{1,12}\s*", text) or int(text) < least:
        raise ArgumentTypeError(f'"{text}" must be a whole number, {least} to 999999999999')
    return int(text)


def positive_number(text: str) -> float:
    """Parse a positive number, such as 0.25, that an option of a command is given.

    Raises ArgumentTypeError for other text; the command adds the option's name.
    """
    try:
        value = float(text)
    except ValueError:
        # NaN lies in no range, so it is refused below.
        value = math.nan
    if not 0 < value < 1e9:
        raise ArgumentTypeError(f'"{text}" must be a positive number, such as 0.25, below 1e9')
    return value
