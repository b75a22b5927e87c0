"""Launches from cells of a real Jupyter kernel: a script's faults, and what only a kernel does."""

import os
import re
import signal

import pytest
from launch_faults import FAULTS, HEADER
from processes import still_running

running_kernel = pytest.importorskip("kernels").running_kernel

ENDLESS = """
def endless():
    print("pid", os.getpid(), flush=True)
    if dist.get_rank() == 0:
        while True: time.sleep(0.1)
    dist.barrier()
launch(endless, world_size={world_size})
"""


@pytest.fixture(scope="module")
def kernel():
    """One kernel for all cells, with torch and the launch server already loaded."""
    with running_kernel() as kernel:
        assert not kernel.run(HEADER + "launch(lambda: None)").error
        yield kernel


# There is one fault of each kind.
IN_CELLS = (
    "exception",
    "killed in all-reduce",
    "segmentation fault",
    "one rank does not call",
)


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.name in IN_CELLS], ids=lambda fault: fault.name
)
def test_fault_in_a_cell(kernel, fault):
    output = kernel.run(fault.cell(2))
    assert output.error == fault.error, output
    assert re.search(fault.pattern.replace("{culprit}", "1"), output.message), output.message


def test_the_stop_button(kernel):
    pressed = []

    def press(text):
        if not pressed:
            pressed.append(text)
            kernel.manager.interrupt_kernel()

    handlers = "[signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]"
    before = kernel.run(handlers).result
    output = kernel.run(ENDLESS.format(world_size=2), on_stdout=press)
    assert output.error == "KeyboardInterrupt"
    assert kernel.run("launch(lambda x: x * dist.get_rank(), 3, world_size=2)").result == "[0, 3]"
    assert kernel.run(handlers).result == before
    assert len(kernel.descendants()) == 1, "only the launch server may be left"


@pytest.mark.parametrize("ending", ["kill", "restart"])
def test_every_rank_goes_with_the_kernel(ending, world_size=2):
    with running_kernel() as kernel:
        message = kernel.client.execute(HEADER + ENDLESS.format(world_size=world_size))
        ranks = wait_for_ranks(kernel.client, message, world_size)
        descendants = kernel.descendants()
        assert ranks <= {process.pid for process in descendants}
        if ending == "kill":
            os.kill(kernel.pid, signal.SIGKILL)
        else:
            kernel.manager.restart_kernel(now=True)
        assert not still_running([process.pid for process in descendants])


def wait_for_ranks(client, message, world_size):
    """Return the process ids that the ranks print."""
    printed = ""
    while len(pids := re.findall(r"\[rank \d\] pid (\d+)", printed)) < world_size:
        reply = client.get_iopub_msg(timeout=300)
        assert reply["msg_type"] != "error", reply["content"]
        if reply["msg_type"] == "stream" and reply["parent_header"].get("msg_id") == message:
            printed += reply["content"]["text"]
    return {int(pid) for pid in pids}


def test_prints_are_whole_lines_live_and_in_order(kernel, tmp_path):
    """The ranks wait until the first print has arrived: it would not if all came at the end."""
    arrived = tmp_path / "arrived"
    output = kernel.run(
        f"arrived = {str(arrived)!r}"
        + """
def talk():
    print("first", end=" ")
    print("line", "x" * 100_000)
    print("to stderr", file=sys.stderr)
    os.write(1, b"from below\\n")
    for i in range(50): print(i)
    dist.barrier()
    while not os.path.exists(arrived): time.sleep(0.05)
    print("no newline at the end", end="")
launch(talk, world_size=4)
""",
        on_stdout=lambda text: arrived.touch(),
    )
    expected = [
        "first line " + "x" * 100_000,
        "from below",
        *map(str, range(50)),
        "no newline at the end",
    ]
    for rank in range(4):
        lines = [line for line in output.stdout.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines == [f"[rank {rank}] {line}" for line in expected]
    assert len(output.stdout.splitlines()) == 4 * len(expected)
    assert sorted(output.stderr.splitlines()) == [f"[rank {rank}] to stderr" for rank in range(4)]


def test_edited_cells_and_modules_are_seen(kernel, tmp_path):
    module = tmp_path / "edited_module.py"
    module.write_text("def value(): return 1\n")
    setup = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.dont_write_bytecode = True\nimport"
        " edited_module"
    )
    assert not kernel.run(setup).error
    cell = "def outer(): return edited_module.value() + {}\nlaunch(outer, world_size=2)"
    assert kernel.run(cell.format(10)).result == "[11, 11]"
    module.write_text("def value(): return 2  # edited\n")
    assert kernel.run(cell.format(20)).result == "[22, 22]"
