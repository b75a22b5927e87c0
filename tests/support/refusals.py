"""Attempts that must be refused in plain words: noted one by one, made on the same ranks."""

from collections.abc import Callable
from typing import NamedTuple


class Attempt(NamedTuple):
    """What must be refused, and words that the refusal must have."""

    make: Callable
    words: str


class Refusals:
    """Attempts that must be refused, by the names of their functions."""

    def __init__(self):
        self.attempts = {}

    def refused(self, words):
        """Note that the function below is to be refused in these words."""

        def note(function):
            assert function.__name__ not in self.attempts, "two attempts have one name"
            self.attempts[function.__name__] = Attempt(function, words)
            return function

        return note

    def messages(self):
        """Make all attempts; return {name: the refusal with its kind, or "nothing"}."""
        messages = {}
        for name, attempt in self.attempts.items():
            try:
                attempt.make()
                messages[name] = "nothing"
            except (RuntimeError, ValueError, TypeError) as error:
                messages[name] = f"{type(error).__name__}: {error}"
        return messages

    def assert_told(self, messages):
        """Assert that each of the messages has the words that it must have."""
        assert messages.keys() == self.attempts.keys()
        for name, message in messages.items():
            assert self.attempts[name].words in message, f"{name}: {message}"
