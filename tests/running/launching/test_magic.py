"""`%%ranks` in a real kernel, and what nbval makes of it and of the progress bar."""

import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import nbformat
import pytest
from kernels import running_kernel
from nbclient import NotebookClient

CELL = """%%ranks 3 --pull total,note
print("rank", rank, "of", world_size, "on", device)
total = torch.tensor(base + rank)
dist.all_reduce(total)
note = {"seen by": rank, "doubled": double(base)}
total, twice(rank)
"""
SETUP = """
%load_ext ddp_course
base = 10
def twice(x): return 2 * x
def double(x): return twice(x)
unsendable = (n for n in range(3))
"""


@contextmanager
def starting_by(method):
    """Kernels that are started now launch their ranks in this way."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MANYRANKS_START", method)
        yield


@pytest.fixture(scope="module", params=["fork", pytest.param("spawn", marks=pytest.mark.weekly)])
def kernel(request):
    """A kernel with the extension and a few names in it, whose ranks come to life in both ways."""
    with starting_by(request.param), running_kernel() as kernel:
        assert not kernel.run(SETUP).error
        asked = kernel.run(
            "from ddp_course.running.launching.setting import start_method\nstart_method()"
        )
        assert asked.result == repr(request.param)
        yield kernel


def test_a_cell_runs_on_all_ranks_with_output_grouped_by_rank(kernel):
    output = kernel.run(CELL)
    assert output.error == "", output.message
    expected = [
        line
        for rank in range(3)
        for line in (
            f"[rank {rank}] rank {rank} of 3 on cpu",
            f"[rank {rank}] (tensor(33), {2 * rank})",
        )
    ]
    assert output.stdout.splitlines() == expected
    assert kernel.run("total, note").result == "(tensor(33), {'seen by': 0, 'doubled': 20})"
    assert kernel.run("%%ranks 2\nrank;").stdout == ""


def test_errors_show_the_cell_and_what_was_printed_before(kernel):
    output = kernel.run("%%ranks 2\nprint('before')\nif rank == 1:\n    torch.ones(3)[5]")
    assert output.error == "RankError"
    assert "rank 1: IndexError" in output.message and "torch.ones(3)[5]" in output.message
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


KEPT = [  # cells that run one after the other, and what they show, or a word of their error
    ("rate = 1", ""),
    ("%%ranks 2 --keep\nx = torch.ones(1) * rank\ndef later(): return defined_later * rate", ""),
    ("rate = 5", ""),
    (
        "%%ranks\ndefined_later = 7\nx.item(), rate, later()",
        "[rank 0] (0.0, 5, 35)\n[rank 1] (1.0, 5, 35)\n",
    ),
    ("%%ranks\nundefined", "'undefined' is not defined"),
    ("%%ranks --pull absent\nrank", '"absent" is to be pulled'),
    ("%%ranks 3\n1", "2 ranks are kept"),
    ("%%ranks --pull x\ndist.all_reduce(x); later()", "[rank 0] 35\n[rank 1] 35\n"),
    ("%ranks stop", ""),
    ("%ranks stop", "no ranks are kept\n"),
    ("%%ranks 2\n'later' in globals()", "[rank 0] False\n[rank 1] False\n"),
    ("%ranks --help", "--keep"),
]


def test_kept_ranks_have_their_variables_in_the_next_cells(kernel):
    for cell, expected in KEPT:
        output = kernel.run(cell)
        if expected.endswith("\n"):
            assert output.stdout == expected, cell
        assert expected in output.stdout + output.stderr + output.message, cell
    assert kernel.run("x").result == "tensor([1.])"


ALONE = """%%ranks 2 --keep
model = torch.nn.Linear(2, 1)
model.weight.data.fill_(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()"""


def test_kept_ranks_that_train_alone_are_named_in_that_cell_and_in_no_other(kernel):
    assert "no collective ran" in kernel.run(ALONE).stderr
    assert kernel.run("%%ranks\nrank;").stderr == ""
    kernel.run("%ranks stop")


ENDED = "The kept ranks have ended, and their variables with them"


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("%%ranks\nimport os\nif rank == 1: os._exit(3)", "exited: with code 3"),
        ("%%ranks\nif rank == 1: raise ValueError('alone')\ndist.barrier()", "ValueError: alone"),
        ("%%ranks --timeout 1\nwhile True: pass", "not finished after 1 s"),
        ("import os\nos.kill(victim, 9)\n", ""),
        ("import time\ntime.sleep(4)", ""),  # nobody wants them for longer than they wait
        ("interrupt", ""),
    ],
)
def test_kept_ranks_that_cannot_go_on_end_and_say_so(cell, error):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MANYRANKS_IDLE", "2" if "sleep" in cell else "900")
        with running_kernel() as kernel:
            assert not kernel.run(SETUP).error
            assert not kernel.run(
                "%%ranks 2 --keep --pull victim\nimport os\nvictim = os.getpid()"
            ).error
            if cell == "interrupt":
                stop = threading.Timer(3, kernel.manager.interrupt_kernel)
                stop.start()
                output = kernel.run("%%ranks\nimport time\nwhile True: time.sleep(0.1)")
                assert output.error == "KeyboardInterrupt"
            else:
                output = kernel.run(cell)
            assert error in output.message
            if "%%ranks" not in cell and cell != "interrupt":
                output = kernel.run("%%ranks\nvictim")
                assert output.error in ("RankError", "LaunchError")
            assert ENDED in output.stderr
            assert kernel.run("%%ranks 2\n'victim' in globals()").stdout.count("False") <= 2
            left = [" ".join(process.cmdline()) for process in kernel.descendants()]
            assert not [line for line in left if not re.search(r"launching/server\.py", line)]


def test_nbval_accepts_the_magic_and_the_progress_bar(tmp_path):
    train = (
        "import torch\nfrom ddp_course import launch\ndef train(steps):\n    optimizer ="
        " torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)\n    for _ in range(steps):"
        " optimizer.step()\n    return steps\nlaunch(train, 20, world_size=2, progress=20)"
    )
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, CELL, "total", train)]
    notebook = nbformat.v4.new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "p"}}
    )
    NotebookClient(notebook, timeout=120).execute()
    nbformat.write(notebook, tmp_path / "magic.ipynb")
    nbval = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path / "magic.ipynb"),
    ]
    ended = subprocess.run(
        nbval, capture_output=True, text=True, cwd=tmp_path, timeout=180, check=False
    )
    assert ended.returncode == 0, ended.stdout
    notebook.cells[2].outputs[0]["data"]["text/plain"] = "tensor(34)"
    nbformat.write(notebook, tmp_path / "magic.ipynb")
    assert (
        subprocess.run(
            nbval, capture_output=True, cwd=tmp_path, timeout=180, check=False
        ).returncode
        != 0
    )
