"""A public function that raises says so."""

import pytest
import raises

BODY = "\n    if number < 0:\n        raise ValueError('below 0')\n    return number\n"


def function(name, words):
    return f"def {name}(number):\n    '''{words}'''{BODY}"


@pytest.mark.parametrize(
    "source",
    [
        function("root", "Raises an error below 0."),
        function("root", "The root; ValueError below 0."),
        function("_root", "The root."),
        "def root(number):\n    '''The root.'''\n    def inner():\n        raise ValueError('x')\n",
        "def root():\n  '''The root.'''\n  try:\n    pass\n  except OSError:\n    raise\n",
    ],
)
def test_what_says_so_or_has_no_error_of_its_own(source):
    assert raises.silent(source) == []


def test_what_is_silent_is_found_in_classes_too():
    assert raises.silent(function("root", "The root.")) == [(1, "root")]
    method = "\n".join("    " + line for line in function("root", "The root.").split("\n"))
    assert raises.silent(f"class Number:\n{method}") == [(2, "root")]


def test_no_function_of_the_packages_is_silent():
    assert raises.main() == 0
