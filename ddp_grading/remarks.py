"""Remarks for a person, at no cost in points: answers that use what no answer needs, and answers
that are alike.
"""

import io
import keyword
import re
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from functools import cache

from ddp_course.checking.tasks import solution

from .results import Result

LEAST_TOKENS = 60  # Shorter answers are alike because there is one way to write them.
ALIKE = 0.95
MOST_REMARKS = 6
LEADS_OUT = re.findall(
    r"\w+",
    "__builtins__ __closure__ __code__ __defaults__ __dict__ __globals__ __import__ __subclasses__"
    " _getframe builtins ctypes eval exec f_back get_objects importlib inspect linecache os"
    " multiprocessing open pathlib pickle shutil socket subprocess tempfile"
    " __eq__ __ne__ __lt__ __bool__ __float__ __len__ __class__",  # These can fake equality.
)


def remarks(source: str, given: str = "") -> list[str]:
    """The lines of an answer that have an odd word, and the word; no word of the notebook `given`
    out is odd.
    """
    odd = set(LEADS_OUT) - {token.string for token in tokens(given)}
    lines = []
    for token in tokens(source):
        word = token.string
        line = token.line.strip()
        if word in odd or (word == "ddp_course" and line not in given):
            lines.append(f"line {token.start[0]} has {word}: {line[:80]}")
    return list(dict.fromkeys(lines))[:MOST_REMARKS]


def tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a piece of Python, up to a syntax error, which the kernel reports."""
    with suppress(tokenize.TokenError, SyntaxError):
        yield from tokenize.generate_tokens(io.StringIO(source).readline)


@cache
def shape(source: str) -> tuple[str, ...]:
    """An answer's words without comments and docstrings; each variable is the number of its first
    use.
    """
    numbers: dict[str, str] = {}
    words = []
    before = ""
    for token in tokens(source):
        word = token.string
        if token.type == tokenize.NAME and not keyword.iskeyword(word) and before != ".":
            word = numbers.setdefault(word, str(len(numbers)))
        if word.strip() and not word.startswith(("#", '"""')):
            words.append(word)
        before = token.string
    return tuple(words)


def alike(words: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two shapes are nearly the same."""
    matcher = SequenceMatcher(None, words, other, autojunk=False)
    return matcher.quick_ratio() >= ALIKE and matcher.ratio() >= ALIKE


def likeness(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """(task, learners whose answers are alike), a line a group. Answers that earned nothing, short
    ones, and those like the lesson's are not compared.
    """
    groups: dict[tuple, list[str]] = {}
    for result in results:
        for task in result.tasks:
            words = shape(task.answer)
            compared = task.points and len(words) >= LEAST_TOKENS
            if compared and not alike(words, shape(solution(task.id))):
                shapes = (other for number, other in groups if number == task.id)
                first = next((other for other in shapes if alike(words, other)), words)
                groups.setdefault((task.id, first), []).append(result.learner)
    return [(number, group) for (number, _), group in groups.items() if len(group) > 1]
