"""The numbers that options of commands are given, with refusals for people."""

import math
import re
from argparse import ArgumentTypeError


def whole_number(text: str, least: int = 1) -> int:
    """Parse a whole number, for an option of a command, which names the option. Raises
    ArgumentTypeError for other text.
    """
    if not re.fullmatch(r"\s*\+?[0-9]{1,12}\s*", text) or int(text) < least:
        raise ArgumentTypeError(f'"{text}" must be a whole number, {least} to 999999999999')
    return int(text)


def positive_number(text: str) -> float:
    """Parse a positive number such as 0.25, for an option of a command, which names the option.
    Raises ArgumentTypeError for other text.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan  # It is refused below: NaN lies in no range.
    if not 0 < value < 1e9:
        raise ArgumentTypeError(f'"{text}" must be a positive number, such as 0.25, below 1e9')
    return value
