"""A cell that is interrupted, or lacks a name: a line says what to do, in a real kernel."""

import queue
import time

import pytest
from jupyter_client.manager import start_new_kernel

# The interrupt may come before the sleep: both stand in one line, so that the message is the same.
LOOP = """def wait_long():
    print("begun", flush=True); time.sleep(600)
"""


@pytest.fixture(scope="module")
def kernel():
    manager, client = start_new_kernel()
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def interrupted(kernel, code):
    """The error of a cell that is interrupted once it has printed "begun"."""
    manager, client = kernel
    # Otherwise the kernel would drop the cell that comes next.
    request = client.execute(code, stop_on_error=False)
    sent = False
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != request:
            continue
        begun = message["msg_type"] == "stream" and "begun" in message["content"]["text"]
        if begun and not sent:
            sent = True
            manager.interrupt_kernel()
        if message["msg_type"] == "error":
            return message["content"]
    raise AssertionError("the cell was not interrupted")


def test_an_interrupted_cell_says_in_one_line_where_it_stopped(kernel):
    _, client = kernel
    client.execute("import time\nimport ddp_course.lab\n" + LOOP)
    error = interrupted(kernel, "wait_long()\nprint('never')")
    assert error["ename"] == "KeyboardInterrupt"
    assert error["traceback"] == [
        'Stopped at line 4 of the cell that defines wait_long: print("begun", flush=True);'
        " time.sleep(600). The kernel goes on: run any cell."
    ]
    launched = "from ddp_course import launch\nlaunch(wait_long, world_size=2)"
    [line] = interrupted(kernel, launched)["traceback"]
    assert line.startswith("Stopped at line 2 of the cell: launch(wait_long, world_size=2).")
    seen: list = []  # Other errors are shown as ever.
    client.execute_interactive("1 / 0", output_hook=seen.append, timeout=300)
    [error] = [message["content"] for message in seen if message["msg_type"] == "error"]
    assert error["ename"] == "ZeroDivisionError"
    assert len(error["traceback"]) > 1


def test_a_cell_that_is_run_too_early_says_which_cells_come_first(kernel):
    _, client = kernel
    client.execute("from ddp_course import lab, launch\ndef early(): return seconds")
    codes = {
        "print(seconds)": True,
        "early()": True,
        "launch(early, world_size=2)": True,
        "eval('lab', {})": False,
        "launch(int, 'x', world_size=2)": False,
    }
    for code, hint in codes.items():
        seen: list = []
        client.execute_interactive(code, output_hook=seen.append, timeout=300)
        [error] = [message["content"] for message in seen if message["msg_type"] == "error"]
        assert error["traceback"]
        texts = [m["content"]["text"] for m in seen if m["msg_type"] == "stream"]
        told = "No cell that has run in this kernel makes seconds. If a cell further up"
        assert ("".join(texts).startswith(told)) == hint, (code, texts)


def test_a_line_that_is_not_indented_is_told_which_function_has_its_name(kernel):
    _, client = kernel
    client.execute("import ddp_course.lab\ndef my_ring(tensor): incoming = tensor")
    said = {}
    for name in ("incoming", "outgoing"):
        seen: list = []
        client.execute_interactive(name, output_hook=seen.append, timeout=300)
        texts = [m["content"]["text"] for m in seen if m["msg_type"] == "stream"]
        said[name] = "(incoming is known inside my_ring, only to lines that" in "".join(texts)
    assert said == {"incoming": True, "outgoing": False}
