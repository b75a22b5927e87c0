"""Who is who: folders as platforms deliver them, and what teachers make of them.

The platforms are Canvas, Moodle, Gradescope and GitHub Classroom.
"""

import csv
import io
import os
import zipfile

import pytest
from answers import ROOT, notebook_of

from ddp_course.lab import cli
from ddp_exercises.errors import GradingError
from ddp_exercises.grading.answers import load_exercises
from ddp_exercises.grading.gradebooks import as_canvas, as_moodle
from ddp_exercises.grading.people import in_roster, owners_of, read_roster
from ddp_exercises.grading.results import Result, TaskResult
from ddp_exercises.grading.submissions import find_submissions, without_exercises_not_begun

SOLVED = (ROOT / "solutions" / "04_ring_all_reduce.ipynb").read_text()
UNTOUCHED = (ROOT / "exercises" / "04_ring_all_reduce.ipynb").read_text()
CANVAS_EXPORT = """Student,ID,SIS User ID,SIS Login ID,Section,Exercise 4 (777)
    Points Possible,,,,,13
"Doe, Jane",12348,s1,jd@x,A,
"Roe, Rick",12350,s2,rr@x,A,
"Poe, Nan",12352,s3,np@x,A,
"""
WORKSHEET = """Identifier,Full name,Email address,Status,Grade
Participant 1234567,Ada Lovelace,ada@x,Submitted,
Participant 1234568,Grace Hopper,grace@x,Submitted,
"""
METADATA = """---
submission_301:
  :submitters:
  - :name: Ada Lovelace
    :sid: '77'
    :email: ada@example.org
  :created_at: 2026-11-20 20:39:52.123456000 Z
submission_302:
  :submitters:
  - :name: Grace Hopper
    :email: grace@example.org
  - :name: Alan Turing
    :email: alan@example.org
"""


def lay_out(folder, files):
    """Write files, {path: text}, below a folder; the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def handed_in(*paths, roster=None):
    """Return sorted (learner, file) of all submissions."""
    submissions, _ = find_submissions(paths, roster)
    return sorted((work.learner, work.file) for work in submissions)


def zipped(path, files):
    """Return a zip of {name: text}."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


CANVAS = {
    "doejane_12348_67893_04_ring_all_reduce-2.ipynb": SOLVED,
    "roerick_LATE_12350_67899_mine.ipynb": SOLVED,
}


@pytest.mark.parametrize("packed", [False, True])
def test_canvas_flat_download(packed, tmp_path):
    path = lay_out(tmp_path / "dl", CANVAS) if not packed else zipped(tmp_path / "dl.zip", CANVAS)
    (tmp_path / "roster.csv").write_text(CANVAS_EXPORT)
    roster = read_roster(tmp_path / "roster.csv")
    assert list(roster) == ["Doe, Jane", "Roe, Rick", "Poe, Nan"]
    submissions, _ = find_submissions([path], roster)
    assert [(work.learner, work.late) for work in submissions] == [
        ("Doe, Jane", False), ("Roe, Rick", True)
    ]  # fmt: skip
    results = [Result(work.learner, 4, [TaskResult("4.1", 3, 13)]) for work in submissions]
    header, _, jane, rick, nan = csv.reader(io.StringIO(as_canvas(results, roster)))
    assert header[5] == "Exercise 4 (777)"
    assert jane[:2] == ["Doe, Jane", "12348"]
    assert (jane[5], rick[5], nan[5]) == ("3", "3", "")
    alone, _ = find_submissions([path])
    assert [(work.learner, work.about["ID"]) for work in alone] == [
        ("doejane", "12348"), ("roerick", "12350")
    ]  # fmt: skip
    result = Result("doejane", 4, [TaskResult("4.1", 3, 13)], about=alone[0].about)
    assert "\ndoejane,12348,,,,3\n" in as_canvas([result], {})


def test_moodle_folders(tmp_path):
    folder = lay_out(
        tmp_path / "m",
        {
            "Ada Lovelace_1234567_assignsubmission_file_/04_x.ipynb": SOLVED,
            "Grace Hopper_1234568_assignsubmission_file_/deep/er/04_x.ipynb": SOLVED,
        },
    )
    (tmp_path / "worksheet.csv").write_text(WORKSHEET)
    roster = read_roster(tmp_path / "worksheet.csv")
    for known in (None, roster):
        submissions, _ = find_submissions([folder], known)
        assert [work.learner for work in submissions] == ["Ada Lovelace", "Grace Hopper"]
        result = Result("Ada Lovelace", 4, [TaskResult("4.1", 3, 13)], about=submissions[0].about)
        rows = list(csv.reader(io.StringIO(as_moodle([result], known or {}, 4))))
        assert rows[1][0] == "Participant 1234567"
        assert rows[1][3] == "3"


def test_gradescope_export(tmp_path):
    files = {f"submission_30{n}/04_x.ipynb": SOLVED for n in (1, 2)}
    folder = lay_out(tmp_path / "export", {**files, "submission_metadata.yml": METADATA})
    names = [learner for learner, _ in handed_in(folder)]
    assert names == ["Ada Lovelace", "Alan Turing", "Grace Hopper"]


def test_github_classroom_repositories_count_no_solutions(tmp_path):
    files = {}
    for name in ("ring-ada", "ring-grace"):
        for kind in ("exercises", "solutions", "notebooks"):
            for path in sorted((ROOT / kind).glob("0[45]_*.ipynb")):
                files[f"{name}/{kind}/{path.name}"] = path.read_text()
        for path in (ROOT / "authoring/lessons").glob("04_*.py"):
            files[f"{name}/authoring/lessons/{path.name}"] = path.read_text()
        files[f"{name}/.git/HEAD"] = files[f"{name}/tests/x.py"] = ""
    files["ring-ada/exercises/04_ring_all_reduce.ipynb"] = SOLVED
    folder = lay_out(tmp_path / "repos", files)
    (tmp_path / "r.csv").write_text("identifier,github_username\nLovelace,ada\nHopper,grace\n")
    submissions, _ = find_submissions([folder], read_roster(tmp_path / "r.csv"))
    kept = without_exercises_not_begun(submissions, load_exercises())
    assert sorted((work.learner, work.file) for work in kept) == [
        ("Hopper", "exercises/04_ring_all_reduce.ipynb"),
        ("Lovelace", "exercises/04_ring_all_reduce.ipynb"),
    ]
    assert {learner for learner, _ in handed_in(folder)} == {"ring-ada", "ring-grace"}


def test_sections_nested_folders_zips_and_several_paths(tmp_path):
    folder = lay_out(
        tmp_path / "class",
        {"A/ada/04_x.ipynb": SOLVED, "A/grace/ps4/04_x.ipynb": SOLVED, "B/tom/my/04.ipynb": SOLVED},
    )
    names = [learner for learner, _ in handed_in(folder / "A", folder / "B")]
    assert names == ["ada", "grace", "tom"]
    flat = lay_out(tmp_path / "flat", {f"{name}/04_x.ipynb": SOLVED for name in ("ada", "ben")})
    zipped(flat / "carl.zip", {"04_x.ipynb": SOLVED, "__MACOSX/04_x.ipynb": ""})
    (flat / "dan.zip").write_text("no zip")
    (flat / "nobody").mkdir()
    (flat / "ada" / "data").mkdir()
    one = handed_in(flat)
    assert one == [
        ("ada", "04_x.ipynb"), ("ben", "04_x.ipynb"), ("carl", "04_x.ipynb"),
        ("dan", "dan.zip"), ("nobody", ""),
    ]  # fmt: skip
    assert handed_in(*sorted(flat.iterdir())) == one
    assert handed_in(flat / "ada") == handed_in(flat / "ada" / "04_x.ipynb") == one[:1]


def test_what_is_not_clear_ends_before_anything_runs(tmp_path, capsys):
    names = ("A/ada", "A/eve", "B/ada")
    twice = lay_out(tmp_path / "c", {f"{name}/04_x.ipynb": SOLVED for name in names})
    assert cli.main(["grade", str(twice)]) == 2
    assert "two folders claim to be ada's: c/A/ada and c/B/ada" in capsys.readouterr().err
    (tmp_path / "names").write_text("grace\n")
    ada = str(twice / "A" / "ada")
    assert cli.main(["grade", ada, "--roster", str(tmp_path / "names")]) == 2
    assert "not in the roster: ada/04_x.ipynb" in capsys.readouterr().err
    merged = lay_out(tmp_path / "m", {"04_ada.ipynb": SOLVED, "04_ben.ipynb": SOLVED})
    with pytest.raises(GradingError, match="two notebooks of exercise 04"):
        find_submissions([merged])


def test_all_is_read_before_the_first_one_runs(tmp_path):
    folder = lay_out(tmp_path / "class", {"ada/04_x.ipynb": SOLVED})
    submissions, _ = find_submissions([folder])
    (folder / "ada" / "04_x.ipynb").unlink()
    assert len(submissions[0].cells) > 6
    assert len(submissions[0].digest) == 16
    assert {cell.task for cell in submissions[0].cells} >= {"4.1", "4.6"}
    assert notebook_of(4).cells


TWO_LEES = """learner,Name,ID,Email
kim1,Kim Lee,101,kl@x
kim2,"Lee, Kim",102,lk@x
ann,Ann Lee,103,al@x
"""


@pytest.mark.parametrize(
    ("folder", "learner"),
    [
        ("kim2", "kim2"),
        ("Kim Lee", ""),
        ("Lee Kim_102", "kim2"),
        ("hw-ring-kim1", "kim1"),
        ("lee ann", "ann"),
        ("al@x", "ann"),
        ("kim1_102", ""),
        ("Lee", ""),
    ],
)
def test_the_roster_s_learner_is_the_one_of_whom_most_is_in_the_path(folder, learner, tmp_path):
    (tmp_path / "r.csv").write_text(TWO_LEES)
    roster = read_roster(tmp_path / "r.csv")
    parts = ("class", folder, "04_x.ipynb")
    assert in_roster(owners_of(parts, {}, set())[0], parts, roster) == learner


def test_what_cannot_be_read_has_a_fault_and_costs_nobody_else(tmp_path):
    folder = lay_out(tmp_path / "c", {"ada/04_x.ipynb": SOLVED, "ben/04_x.ipynb": SOLVED})
    (folder / "ben" / "04_x.ipynb").chmod(0)
    (folder / "carl.zip").write_bytes(b"PK")
    (folder / "dan").mkdir()
    damaged = zipped(folder / "emil.zip", {"04_x.ipynb": SOLVED})
    content = bytearray(damaged.read_bytes())
    content[100] ^= 255
    damaged.write_bytes(content)
    os.mkfifo(folder / "fifo.ipynb")
    faults = {work.learner: work.fault for work in find_submissions([folder])[0]}
    assert faults.pop("ada") == ""
    assert faults.pop("carl") == "cannot be read as an archive"
    assert "no notebook" in faults.pop("dan")
    assert "Bad CRC-32" in faults.pop("emil")
    assert faults.pop("fifo") == "is not a file, or a link to nothing"
    if os.getuid():
        assert "Permission denied" in faults["ben"]


def test_a_repository_is_one_learner_s_and_own_work_in_a_folder_solutions_counts(tmp_path):
    own = SOLVED.replace("(rank - step)", "(rank + step)")
    files = {"ring-ada/my/own/04_x.ipynb": SOLVED, "ring-ada/.git/HEAD": ""}
    files |= {"ben/solutions/04_x.ipynb": own, "carl/04_x.ipynb": own}
    files["carl/solutions/04_x.ipynb"] = SOLVED
    assert handed_in(lay_out(tmp_path / "c", files)) == [
        ("ben", "solutions/04_x.ipynb"),
        ("carl", "04_x.ipynb"),
        ("ring-ada", "my/own/04_x.ipynb"),
    ]


ZIPS = {
    "zipped/hw.zip": ["homework/04_x.ipynb"],
    "windows/hw.zip": ["homework\\04_x.ipynb"],
    "odd/my stuff.zip": ["all of it/deep/04_x.ipynb"],
    "hanna.zip": ["homework/04_x.ipynb"],
}
OWN_FOLDERS = {
    "ada/mine.zip": ["homework/04_x.ipynb"],
    "ben/first try.zip": ["04_x.ipynb"],
    "ben/second try.zip": ["my\\own/04_x.ipynb"],
    "carl/a/b/c/in.zip": ["04.ipynb/homework/04_x.ipynb"],
    "dora/solutions and more.zip": ["main/exercises/04_x.ipynb", "main/old/x/05_x.ipynb"],
    "emil/hw.zip": ["04_x.ipynb"],
}
ONE_WRAPPER = {"2026/A/ada.zip": ["04_x.ipynb"], "2026/A/ben.zip": ["x/04_x.ipynb"]}
SECTIONS = {
    "A/ada.zip": ["mine/04_x.ipynb"],
    "B/ben.zip": ["04_x.ipynb"],
    "B/carl.zip": ["04_x.ipynb"],
    "all.zip": ["dora/04_x.ipynb", "emil/04_x.ipynb"],
}


@pytest.mark.parametrize(
    ("archives", "learners"),
    [
        (ZIPS, ["hanna", "odd", "windows", "zipped"]),
        (OWN_FOLDERS, ["ada", "ben", "ben", "carl", "dora", "dora", "emil"]),
        (ONE_WRAPPER, ["ada", "ben"]),
        (SECTIONS, ["ada", "ben", "carl", "dora", "emil"]),
    ],
)
def test_what_a_learner_packs_names_nobody(archives, learners, tmp_path):
    for name, files in archives.items():
        (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        zipped(tmp_path / "c" / name, dict.fromkeys(files, SOLVED))
    submissions, _ = find_submissions([tmp_path / "c"])
    assert sorted(work.learner for work in submissions) == learners
    assert not any(work.fault for work in submissions)
    notes = {work.note for work in submissions if work.learner == "zipped"}
    assert notes <= {"the folder c/zipped says whose it is"}


def test_what_is_no_notebook_is_named(tmp_path):
    files = {
        "ada/04.ipynb.txt": "x",
        "ben/04.py": "x",
        "carl/04.tar.gz": "x",
        "dora/04.ipynb": SOLVED,
    }
    faults = {
        work.learner: work.fault for work in find_submissions([lay_out(tmp_path / "c", files)])[0]
    }
    assert "04.ipynb.txt" in faults["ada"]
    assert "04.py" in faults["ben"]
    assert "04.tar.gz" in faults["carl"]
