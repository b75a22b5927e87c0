"""Makes remarks for a person, at no cost in points: odd words in answers, and answers alike."""

import io
import keyword
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from functools import cache

from ddp_exercises.tasks import solution

from .results import Result

LEAST_TOKENS = 60  # Shorter answers are alike because there is only one way to write them.
ALIKE = 0.95  # Two shapes count as alike from this ratio of SequenceMatcher on.
MOST_REMARKS = 6  # An answer gets at most so many remarks.
# These words lead out of an answer; the last ones can fake equality.
ODD_WORDS = (
    "__builtins__ __closure__ __code__ __defaults__ __dict__ __globals__ __import__ __subclasses__"
    " _getframe builtins ctypes eval exec f_back get_objects importlib inspect linecache os"
    " multiprocessing open pathlib pickle shutil socket subprocess tempfile"
    " __eq__ __ne__ __lt__ __bool__ __float__ __len__ __class__"
)


def remarks(source: str, given: str) -> list[str]:
    """Return the lines of an answer that have an odd word, each with the word.

    `given` is the exercise's own cell of imports. None of its words is odd, and nobody needs more
    of the course than its lines import.
    """
    odd_words = set(ODD_WORDS.split()) - {token.string for token in tokens(given)}
    lines = []
    for token in tokens(source):
        word = token.string
        line = token.line.strip()
        if word in odd_words or (word == "ddp_course" and line not in given):
            lines.append(f"line {token.start[0]} has {word}: {line[:80]}")
    # A word may be twice in a line, which is then named once.
    return list(dict.fromkeys(lines))[:MOST_REMARKS]


def tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of a piece of Python, up to a syntax error, which the kernel reports."""
    with suppress(tokenize.TokenError, SyntaxError):
        yield from tokenize.generate_tokens(io.StringIO(source).readline)


@cache
def shape(source: str, renaming: bool = True) -> tuple[str, ...]:
    """Return an answer's words without comments and without texts between three double quotes.

    With `renaming` a name is the number of its first use, unless it stands after a point.
    """
    numbers: dict[str, str] = {}
    words = []
    word_before = ""
    for token in tokens(source):
        word = token.string
        is_name = token.type == tokenize.NAME and not keyword.iskeyword(word)
        if renaming and is_name and word_before != ".":
            word = numbers.setdefault(word, str(len(numbers)))
        if word.strip() and not word.startswith(("#", '"""')):
            words.append(word)
        word_before = token.string
    return tuple(words)


def published(task: str, source: str) -> str:
    """Return whether an answer is the published solution: "verbatim", "renamed", or "" if not."""
    for name, renaming in {"verbatim": False, "renamed": True}.items():
        if shape(source, renaming) == shape(solution(task), renaming):
            return name
    return ""


def alike(words: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two shapes are nearly the same."""
    matcher = SequenceMatcher(None, words, other, autojunk=False)
    # The quick ratio is never less than the true one, which takes long.
    return matcher.quick_ratio() >= ALIKE and matcher.ratio() >= ALIKE


def likeness(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """Return each group of learners whose answers to a task are alike, with the task.

    Answers that earned nothing, short ones, and those like the lesson's are not compared.
    """
    # A group's key is its task, with the shape of its first answer.
    groups: dict[tuple, list[str]] = {}
    for result in results:
        for task in result.tasks:
            words = shape(task.answer)
            compared = task.points and len(words) >= LEAST_TOKENS
            if compared and not alike(words, shape(solution(task.id))):
                group = group_of(task.id, words, groups)
                groups.setdefault(group, []).append(result.learner)
    return [(task, learners) for (task, _), learners in groups.items() if len(learners) > 1]


def group_of(task: str, words: Sequence[str], groups: Iterable[tuple]) -> tuple:
    """Return the key of the group to which an answer belongs, or else a new one."""
    for other_task, other_words in groups:
        if other_task == task and alike(words, other_words):
            return task, other_words
    return task, words
