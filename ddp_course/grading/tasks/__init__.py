"""The tasks of all exercises, by number: `find("4.2")`.

A task draws inputs from a seed (`draw`, trusted), puts an answer to work on them on some rank (`probe`, which runs
next to code that nobody vouches for, and returns plain data), and says what is wrong with that data (`judge`,
trusted). The judge never sees an object of the learner's.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

from ...errors import Wrong

CANNOT = "your answer returned {} that cannot be compared"
SO_FAR = "right so far: "
RANKS = 4  # every launch has four; smaller worlds are sub-groups


@dataclass(frozen=True)
class Part:
    """A property of an answer, such as "bytes": its weight among the task's points; `message` is "" if it holds."""

    name: str
    weight: float
    message: str = ""


@dataclass
class Task:
    """One task. `names` are what the answer cell defines; `ranks` is 1, or RANKS for tasks that communicate.

    `draw(random, hidden)` gives keyword arguments (a `random.Random` goes in; more and harder cases if `hidden`);
    `probe(*answers, **inputs)` gives plain data of one rank; `prepare(**inputs)`, if there is one, gives more inputs
    for it, as a dict, and whatever it sends is not counted; `parts` are {property: (weight, judge)}, where
    `judge(evidence, **inputs)` raises Wrong: `evidence` is rank 0's data, or a list in rank order.
    `forbidden` are dotted names of functions that would be the answer; `imports` what an answer may import or name
    besides what only computes (`first_sight.COMPUTES`); `private` the
    inputs that have an item a rank, of which each rank sees its own; `hang` is said when ranks wait for ever.
    """

    number: str
    names: tuple
    ranks: int
    draw: callable
    probe: callable
    parts: dict
    forbidden: tuple = ()
    imports: tuple = ()
    private: tuple = ()
    hang: str = "does every receive have its send, and every send its receive, on all ranks?"
    prepare: callable = None

    @property
    def exercise(self):
        """The number of the exercise that this task is a part of."""
        return int(self.number.split(".")[0])

    def judged(self, evidence, **inputs):
        """A `Part` for each property; what a judge cannot compare is no honest answer's data, and does not hold."""
        found = []
        for name, (weight, judge) in self.parts.items():
            try:
                judge(evidence, **inputs)
                found.append(Part(name, weight))
            except Wrong as wrong:
                found.append(Part(name, weight, str(wrong) or "something is wrong, and nothing says what"))
            except Exception as error:
                said = f"{CANNOT} ({type(error).__name__}: {str(error)[:300]})"
                found.append(Part(name, weight, said))
        return found

    def lost(self, why):
        """A `Part` for each property of an answer that has none of them, because of `why`."""
        return tuple(Part(name, weight, why) for name, (weight, _) in self.parts.items())


_tasks = {}


def task(number, names, ranks=1, forbidden=(), imports=(), private=(), hang=Task.hang):
    """Decorate a class with `draw`, `probe` and `parts`, perhaps `prepare`: it becomes a task."""

    def register(definition):
        has = vars(definition)
        names_of = (names,) if isinstance(names, str) else tuple(names)
        lists = tuple(forbidden), tuple(imports), tuple(private)
        made = number, names_of, ranks, has["draw"], has["probe"], has["parts"]
        _tasks[number] = Task(*made, *lists, hang, has.get("prepare"))
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


def exercises():
    """The numbers of all exercises, in order."""
    names = (module.name for module in iter_modules(__path__))
    return sorted(int(name.removeprefix("exercise")) for name in names if name.startswith("exercise"))


def of_exercise(exercise):
    """All tasks of an exercise, in order."""
    import_module(f".exercise{exercise:02d}", __name__)
    chosen = [task for task in _tasks.values() if task.exercise == exercise]
    return sorted(chosen, key=lambda task: int(task.number.split(".")[1]))


def require(condition, message):
    """Raise Wrong with `message` unless `condition` holds."""
    if not condition:
        raise Wrong(message)
