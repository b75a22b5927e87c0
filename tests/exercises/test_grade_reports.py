"""Reports: the forms that programs read, and pages that nothing of a learner's can break out of."""

import csv
import io
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from answers import ROOT, submission_of

from benchmarks import grade as bench
from ddp_course.lab import cli
from ddp_exercises.grading import guard, remarks, report
from ddp_exercises.grading.answers import load_exercises
from ddp_exercises.grading.grader import grade
from ddp_exercises.grading.remarks import likeness
from ddp_exercises.grading.results import Part, Result, TaskResult, clean, merged
from ddp_exercises.grading.submissions import find_submissions
from ddp_exercises.grading.tables import as_csv
from ddp_exercises.plain import ODD, pack, unpack
from ddp_exercises.tasks import find

torch = pytest.importorskip("torch")
NASTY = '<script>alert("x")</script>\x1b[31m\x07 & = {learner}'
PARTS = [Part("sums", 2, 2), Part("bytes", 1, 1, "too many")]
RESULTS = [
    Result(
        "=cmd()", 4, [TaskResult("4.1", 0, 2, clean(NASTY)), TaskResult("4.2", 3, 3, parts=PARTS)]
    ),
    Result(
        "../../etc/anna <b>",
        None,
        [TaskResult("notebook", 0, 0, '"x.ipynb" is empty')],
        '"x.ipynb" is empty',
    ),
]


def test_csv_has_a_line_a_task_and_no_formula():
    rows = list(csv.reader(io.StringIO(report.as_table(RESULTS))))
    assert rows[0][:4] == ["learner", "exercise", "task", "points"]
    assert rows[0][8] == "comment"
    assert rows[2] == ["'=cmd()", "4", "4.2", "3", "3", "", "sums 2/2; bytes 1/1"] + [""] * 5
    assert rows[3][1:5] == ["", "notebook", "0", "0"]


def test_json_has_the_agreed_form():
    first, second = (result.as_dict() for result in RESULTS)
    assert {"learner", "exercise", "tasks", "message", "note", "files", "seed"} <= first.keys()
    assert (first["points"], first["possible"]) == (3, 5)
    assert first["tasks"][1]["parts"] == [asdict(part) for part in PARTS]
    assert second["exercise"] is None
    assert second["tasks"][0]["message"] == '"x.ipynb" is empty'


def test_pages_escape_everything_and_need_nothing_else():
    pages = report.pages(RESULTS)
    assert sorted(pages) == ["hand_back/_cmd_.html", "hand_back/_etc_anna_b_.html", "index.html"]
    page = pages["hand_back/_cmd_.html"]
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page
    assert "{learner}" in page, "a learner's braces are not ours"
    assert "sums: right" in page
    assert "bytes: too many" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "src=" not in page


def test_a_text_is_no_formula_but_a_number_below_zero_is_a_number():
    text = as_csv(["a", "b", "c", "d"], [{"a": -1.0, "b": "-1", "c": None, "d": "=x", "e": "no"}])
    assert text == "a,b,c,d\n-1,'-1,,'=x\n"


def test_names_of_pages_differ_also_where_a_is_the_same_as_big_a():
    class_ = [replace(RESULTS[0], learner=learner) for learner in ("Ann", "ann", "AN/N", "an_n")]
    names = sorted(report.pages(class_))
    assert names == [f"hand_back/{name}.html" for name in ("an_n", "an_n_", "ann", "ann_")] + [
        "index.html"
    ]


def test_the_table_has_no_control_characters():
    assert "\x1b" not in report.table(RESULTS)
    assert "\x07" not in report.table(RESULTS)


@pytest.mark.parametrize(
    "thing",
    [1, 2.5, float("inf"), "a", None, True, [1, (2, {"a": 3})], {(1, 2): [None]}],
)
def test_plain_data_comes_back(thing):
    assert unpack(pack(thing)) == thing


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_come_back(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    back = unpack(pack(tensor))
    assert back.dtype == tensor.dtype
    assert back.equal(tensor)


def test_objects_with_ideas_of_their_own_do_not_come_back():
    class Yes(int):
        def __eq__(self, other):
            return True

    class Tensor(torch.Tensor):
        pass

    for thing in (Yes(3), torch.zeros(2).as_subclass(Tensor), object(), len):
        assert unpack(pack(thing)) == {ODD: type(thing).__name__}


def test_the_bench_judges_rate_and_memory():
    names = (
        "per_minute_and_core",
        "processor_seconds_per_submission",
        "memory_mib_second_half",
        "misjudged",
    )
    for numbers, kept in (((10.0, 6.0, 110, 0), True), ((9.9, 6.1, 111, 1), False)):
        promises = bench.promised(
            {"memory_mib_first_half": 100, **dict(zip(names, numbers, strict=True))}
        )
        assert [promise.record()["kept"] for promise in promises] == [kept] * 4


def sources_of(text):
    """Return the sources of a notebook's cells."""
    return [cell["source"] for cell in json.loads(text)["cells"]]


def test_the_bench_hands_in_solved_wrong_and_unsolved_ones(tmp_path):
    bench.make_submissions(tmp_path, exercise=4, count=10)
    (path,) = (Path(__file__).parents[2] / "solutions").glob("04_*.ipynb")
    made = [next(tmp_path.glob(f"learner{number:03d}/*.ipynb")).read_text() for number in range(10)]
    solution = sources_of(path.read_text())
    sources = list(map(sources_of, made))
    right = [number for number, cells in enumerate(sources) if cells == solution]
    assert right == [number for number in range(10) if bench.is_right(number)] == [3, 4, 8, 9]
    assert sum("NotImplementedError" in str(one) for one in sources) == 2
    assert len({str(one) for one in sources}) == 5, (
        "three different faults, the solution, and nothing"
    )


def test_the_guide_promises_what_the_code_keeps():
    root = Path(__file__).parents[2]
    guide = (root / "docs" / "GRADING.md").read_text()
    assert f"{guard.MEMORY_BYTES >> 30} GiB" in guide
    assert f"{guard.STARTS} processes" in guide
    assert "deploy/grading" in guide
    assert "For strangers' code use a container" in guide
    recipe = (root / "deploy" / "grading.sh").read_text()
    assert "--network none --read-only" in recipe
    assert "--cap-drop ALL" in recipe
    record = json.loads((root / "results" / "bench_grade.json").read_text())
    (measured,) = record["parts"]["throughput"]["rows"]
    seconds = f"took {measured['seconds']:.0f} s on two quiet cores"
    assert f"{seconds}, {measured['processor_seconds_per_submission']} processor seconds" in guide


def a_class(folder):
    """Return the submissions of a class, with what may lie among them."""
    (folder / "anna").mkdir(parents=True)
    for name in ("anna/08_first.ipynb", "anna/08_second.ipynb", "ben.IPYNB", "list.txt"):
        (folder / name).write_text(name)
    (folder / "dora.ipynb").symlink_to(folder / "dora.ipynb")
    return folder


def test_files_that_are_no_submissions_are_named(tmp_path):
    submissions, skipped = find_submissions([a_class(tmp_path / "class")])
    assert [submission.learner for submission in submissions] == ["anna", "anna", "ben", "dora"]
    assert skipped == ["list.txt"]


def graded_as(monkeypatch, results):
    """Let the grader give these results in turn, or raise them; no answer runs."""
    results = iter(results)

    def grade_one(submission, *rest):
        result = next(results)
        if isinstance(result, BaseException):
            raise result
        return replace(result, files={submission.file: submission.digest})

    monkeypatch.setattr("ddp_exercises.grading.grader.grade_one", grade_one)


def test_ctrl_c_keeps_what_has_been_graded(tmp_path, monkeypatch, capsys):
    first = Result("anna", 8, [TaskResult("8.1", 0, 1, "wrong")])
    graded_as(monkeypatch, [first, KeyboardInterrupt()])
    written = tmp_path / "r.json"
    assert (
        cli.main(["grade", str(a_class(tmp_path / "class")), "--json", str(written), "--jobs", "1"])
        == 2
    )
    assert [one["learner"] for one in json.loads(written.read_text())] == ["anna"]
    assert "interrupted after 1 of 4" in capsys.readouterr().err


def test_of_several_submissions_to_an_exercise_the_best_counts(tmp_path, monkeypatch, capsys):
    results = [
        Result("anna", 8, [TaskResult("8.1", points, 1, "" if points else "wrong")])
        for points in (0, 1)
    ]
    graded_as(
        monkeypatch,
        [
            *results,
            Result("ben", 8, [TaskResult("8.1", 1, 1)]),
            Result("dora", None, message="odd"),
        ],
    )
    files = {kind: tmp_path / f"r.{kind}" for kind in ("csv", "json", "html")}
    options = [part for kind, file in files.items() for part in (f"--{kind}", str(file))]
    assert cli.main(["grade", str(a_class(tmp_path / "class")), "--jobs", "1", *options]) == 1
    said = capsys.readouterr()
    assert "skipped: list.txt\n" in said.err
    assert "3 learners, 0 late, 0 without" in said.err
    assert "2 of 3 submissions have all points" in said.out
    assert "handed in 2 times; the best counts" in said.out
    rows = list(csv.reader(files["csv"].open()))
    assert [(row[0], row[3]) for row in rows if row[0] == "anna"] == [("anna", "1")]
    anna, *_ = json.loads(files["json"].read_text())
    assert anna["note"] == "handed in 2 times; the best counts"
    assert anna["points"] == 1
    assert "the best counts" in (files["html"] / "hand_back/anna.html").read_text()


def of_anna(exercise, points, files):
    """Return a result of anna's."""
    return Result("anna", exercise, [TaskResult("8.1", points, 1)], files=files)


NEW = of_anna(8, 0.5, {"new.ipynb": "2"})


@pytest.mark.parametrize(
    ("earlier", "kept"),
    [
        (of_anna(8, 1, {"old.ipynb": "1"}), False),
        (of_anna(None, 0, {"new.ipynb": "1"}), False),
        (of_anna(None, 0, {}), False),
        (of_anna(None, 0, {"other.ipynb": "1"}), True),
        (of_anna(4, 1, {"04.ipynb": "1"}), True),
        (replace(of_anna(8, 1, {"new.ipynb": "2"}), learner="ben"), True),
    ],
)
def test_a_new_result_replaces_that_of_its_exercise_of_its_file_and_of_no_file(earlier, kept):
    results = merged([earlier], [NEW])
    assert NEW in results
    assert (earlier in results) == kept
    assert len(results) == 1 + kept


def test_a_notebook_that_cannot_be_read_counts_nothing_of_what_there_is(tmp_path):
    (tmp_path / "08_mine.ipynb").write_text("{")
    (result,) = grade([submission_of(tmp_path / "08_mine.ipynb")], load_exercises(), seed=1)
    assert (result.points, result.passed) == (0, False)
    assert result.possible > 10
    line, _ = report.table([result]).splitlines()
    assert "0 of " in line
    assert "not valid JSON" in line


def test_an_untouched_exercise_takes_one_line():
    untouched = Result(
        "anna", 8, [TaskResult(f"8.{n}", 0, 1, "not solved yet") for n in range(1, 5)]
    )
    assert len(report.table([untouched]).splitlines()) == 2


def test_what_cannot_be_judged_is_worth_nothing_in_each_of_its_parts(tmp_path):
    (tmp_path / "08_mine.ipynb").write_text("{")
    handed_in = [
        submission_of(tmp_path / "08_mine.ipynb"),
        submission_of(ROOT / "exercises/08_pipeline.ipynb", "bert"),
    ]
    results = list(grade(handed_in, load_exercises(), seed=1))
    for result, message in zip(results, ("not valid JSON", "not solved yet"), strict=True):
        for task in result.tasks:
            assert [part.name for part in task.parts] == list(find(task.id).parts)
            assert sum(part.possible for part in task.parts) == pytest.approx(task.possible)
            assert all(part.points == 0 and message in part.message for part in task.parts)
    page = report.pages(results)["hand_back/bert.html"]
    assert "as above" not in page
    assert page.count("not solved yet") == len(results[1].tasks)


RING = """
def ring(tensor, group=None):
    rank, size, left, right = wire.neighbours(group)
    for step in range(size - 1):
        incoming = torch.empty_like(tensor)
        wire.exchange(tensor, right, incoming, left, group)
        tensor += incoming * (rank + step)
    return tensor.sum() / size
"""


def test_answers_that_are_alike_are_told_in_groups_but_not_if_the_lesson_has_them(
    monkeypatch,
):
    renamed = (
        RING.replace("incoming", "inbox")
        .replace("tensor", "t")
        .replace("def ring", "# mine\ndef my_ring")
    )
    other = RING.replace(
        "tensor += incoming * (rank + step)",
        "for i in range(9):\n            tensor[i] -= incoming[-i]",
    )
    answers = [("anna", RING), ("ben", renamed), ("carl", other), ("dora", RING)]
    answers += [("emil", "def ring(): pass"), ("fritz", "def ring(): pass")]
    results = [
        Result(learner, 4, [TaskResult("4.4", 1, 1, answer=answer)]) for learner, answer in answers
    ]
    assert likeness(results) == [("4.4", ["anna", "ben", "dora"])]
    results[0].tasks[0].points = 0
    assert likeness(results) == [("4.4", ["ben", "dora"])], "who earned nothing copied nothing"
    monkeypatch.setattr(remarks, "solution", lambda number: RING)
    assert likeness(results) == []
