"""`%%ranks` in a real kernel, and what nbval makes of it and of the progress bar."""

import subprocess
import sys
from contextlib import contextmanager

import pytest

nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient
running_kernel = pytest.importorskip("kernels").running_kernel

CELL = """%%ranks 3 --pull total,note
print("rank", rank, "of", world_size, "on", device)
total = torch.tensor(base + rank)
dist.all_reduce(total)
note = {"seen by": rank, "doubled": double(base)}
total, twice(rank)
"""
SETUP = """
%load_ext manyranks
base = 10
def twice(x): return 2 * x
def double(x): return twice(x)
unsendable = (n for n in range(3))
"""


@contextmanager
def starting_by(method):
    """Have kernels that are started within this block launch their ranks by `method`."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MANYRANKS_START", method)
        yield


@pytest.fixture(scope="module", params=["fork", pytest.param("spawn", marks=pytest.mark.weekly)])
def kernel(request):
    """A kernel with the extension and a few names in it, whose ranks come to life in both ways."""
    with starting_by(request.param), running_kernel() as kernel:
        assert not kernel.run(SETUP).error
        asked = kernel.run("from manyranks.launching.setting import start_method\nstart_method()")
        assert asked.result == repr(request.param)
        yield kernel


def test_a_cell_runs_on_all_ranks_with_output_grouped_by_rank(kernel):
    output = kernel.run(CELL)
    assert output.error == "", output.message
    expected = []
    for rank in range(3):
        expected.append(f"[rank {rank}] rank {rank} of 3 on cpu")
        expected.append(f"[rank {rank}] (tensor(33), {2 * rank})")
    assert output.stdout.splitlines() == expected
    assert kernel.run("total, note").result == "(tensor(33), {'seen by': 0, 'doubled': 20})"
    assert kernel.run("%%ranks 2\nrank;").stdout == ""


def test_errors_show_the_cell_and_what_was_printed_before(kernel):
    output = kernel.run("%%ranks 2\nprint('before')\nif rank == 1:\n    torch.ones(3)[5]")
    assert output.error == "RankError"
    assert "rank 1: IndexError" in output.message
    assert "torch.ones(3)[5]" in output.message
    assert output.stdout == "[rank 0] before\n[rank 1] before\n"


@pytest.mark.parametrize(
    ("cell", "error", "words"),
    [
        ("%%ranks 2\nx = = 1", "SyntaxError", "x = = 1"),
        ("%%ranks two\n1", "UsageError", "argument world_size: invalid int value: 'two'"),
        ("%%ranks 2 --pull absent\n1", "UsageError", '"absent" is to be pulled'),
        ("%%ranks 0\n1", "ValueError", "world size is 0"),
        ("%%ranks 2\nunsendable", "TypeError", "unsendable cannot be sent"),
        ("%%ranks 2 --timeout 5\nwhile True: pass", "LaunchTimeout", "while True: pass"),
    ],
)
def test_mistakes_are_told(kernel, cell, error, words):
    output = kernel.run(cell)
    assert error in (output.error or output.stderr)
    assert words in output.message + output.stderr


CELLS = [  # Cells run one after the other; each has what it shows, or a word of its error.
    ("rate = 5", ""),
    (
        "%%ranks 2\nx = torch.ones(1) * rank\nx.item(), rate",
        "[rank 0] (0.0, 5)\n[rank 1] (1.0, 5)\n",
    ),
    ("%%ranks 2\n'x' in globals()", "[rank 0] False\n[rank 1] False\n"),
    ("%ranks --help", "--pull"),
    ("%ranks 2", "begin it with %%ranks"),
]


def test_each_cell_starts_anew_with_the_notebooks_names(kernel):
    for cell, expected in CELLS:
        output = kernel.run(cell)
        if expected.endswith("\n"):
            assert output.stdout == expected, cell
        assert expected in output.stdout + output.stderr + output.message, cell


TRAINS = """
import torch
from manyranks import launch

def train(steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for _ in range(steps):
        optimizer.step()
    return steps

for steps in (20, 3):
    launch(train, steps, world_size=2, progress=20)
"""


def judged_by_nbval(notebook, path):
    """Return the ended process in which nbval has run a notebook and compared its outputs."""
    nbformat.write(notebook, path)
    words = ["-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider", path.name]
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=path.parent,
        timeout=600,
        check=False,
    )


def test_nbval_accepts_the_magic_and_the_progress_bar(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, CELL, "total", TRAINS)]
    notebook = nbformat.v4.new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "p"}}
    )
    NotebookClient(notebook, timeout=600).execute()
    # A reader without widgets sees no bar, rather than one at 0 %.
    assert [output["data"]["text/plain"] for output in notebook.cells[3].outputs] == ["", ""]
    accepted = judged_by_nbval(notebook, tmp_path / "magic.ipynb")
    assert accepted.returncode == 0, accepted.stdout
    notebook.cells[2].outputs[0]["data"]["text/plain"] = "tensor(34)"
    assert judged_by_nbval(notebook, tmp_path / "magic.ipynb").returncode != 0
