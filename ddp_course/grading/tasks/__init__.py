"""The tasks of all exercises, by number: `find("4.2")`.

A task draws inputs from a seed (`draw`, trusted), puts an answer to work on them on some rank (`probe`, which runs
next to code that nobody vouches for, and returns plain data), and says what is wrong with that data (`judge`,
trusted). The judge never sees an object of the learner's.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from ...errors import Wrong

RANKS = 4  # every launch has four; smaller worlds are sub-groups


@dataclass
class Task:
    """One task. `names` are what the answer cell defines; `ranks` is 1, or RANKS for tasks that communicate.

    `draw(random, hidden)` gives keyword arguments (a `random.Random` goes in; more and harder cases if `hidden`);
    `probe(*answers, **inputs)` gives plain data of one rank; `judge(evidence, **inputs)` raises Wrong: `evidence` is rank 0's data, or a list in rank order.
    `forbidden` are dotted names of functions that would be the answer; `imports` what an answer may import or name
    besides what only computes (`first_sight.COMPUTES`); `hang` is said when ranks wait for ever.
    """

    number: str
    names: tuple
    ranks: int
    draw: callable
    probe: callable
    judge: callable
    forbidden: tuple = ()
    imports: tuple = ()
    hang: str = "does every receive have its send, and every send its receive, on all ranks?"

    @property
    def exercise(self):
        """The number of the exercise that this task is a part of."""
        return int(self.number.split(".")[0])


_tasks = {}


def task(number, names, ranks=1, forbidden=(), imports=(), hang=Task.hang):
    """Decorate a class with `draw`, `probe` and `judge`: it becomes a task."""

    def register(definition):
        parts = vars(definition)
        draw, probe, judge = (parts[name] for name in ("draw", "probe", "judge"))
        names_of = (names,) if isinstance(names, str) else tuple(names)
        _tasks[number] = Task(number, names_of, ranks, draw, probe, judge, tuple(forbidden), tuple(imports), hang)
        return definition

    return register


def find(number):
    """The task with this number, such as "4.2"; ValueError if there is none."""
    exercise = str(number).split(".")[0]
    if exercise.isdigit() and find_spec(f".exercise{int(exercise):02d}", __name__):
        import_module(f".exercise{int(exercise):02d}", __name__)
    if number not in _tasks:
        raise ValueError(f"there is no task {number}")
    return _tasks[number]


def of_exercise(exercise):
    """All tasks of an exercise, in order."""
    import_module(f".exercise{exercise:02d}", __name__)
    chosen = [task for task in _tasks.values() if task.exercise == exercise]
    return sorted(chosen, key=lambda task: int(task.number.split(".")[1]))


def require(condition, message):
    """Raise Wrong with `message` unless `condition` holds."""
    if not condition:
        raise Wrong(message)
