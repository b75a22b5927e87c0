"""Break the stages line by line and see whether the tests notice: `python tests/soak/mutation.py [--count N]`.

A mutant has one small fault: a statement left out, a condition turned round, a sign or a number changed. It is killed
if a test fails, or if a test does not come to an end ("hung"). First all tests of a stage run once, and every line of
the stage that one reaches is noted, in its ranks too. Then each mutant meets the tests that reach its line, the short
ones first, for at most `--budget` seconds of them; what no test reaches has survived. The order of the mutants is drawn
once, so a run goes on where the last one ended as long as the file is the same.

What has survived goes to results/mutants.json, each file with the digest of its source; there is room to say why.
With `--again` those are tried once more of which nobody has said it: after tests were added.
So that thousands take hours and not days, this process loads torch once and forks for each mutant, and so does the
launcher's server.
"""

import argparse
import ast
import copy
import hashlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "results" / "mutants.json"
SERVER = "ddp_course/running/launching/server.py"
PARTS = ["ddp_course", "tests", "authoring", "pyproject.toml", "docs", "requirements.lock"]
LOADED = "torch torch.distributed torch.distributed.fsdp torch.multiprocessing torch.utils.data torch._dynamo torch.fx"
LOADED += " torch.distributed.pipelining torch.distributed.optim torch.testing numpy cloudpickle psutil tabulate tqdm"
TESTS = {
    "stage5_bucketed.py": ["tests/test_stage5_bucketed.py"],
    "stage6_ddp": ["tests/stage6_ddp"],
    "stage7_sharded": ["tests/stage7_sharded"],
    "stage8_pipeline.py": [
        "tests/test_stage8_pipeline.py",
        "tests/stage7_sharded/test_clipping.py",
        "tests/stage7_sharded/test_stage7_after_errors.py",
        "tests/stage7_sharded/test_stage7_programs.py",
    ],
    "collectives": ["tests/collectives"],
}
COMMON = ["tests/running/test_communication.py", "tests/stage6_ddp/test_after_errors.py"]  # at several stages
COMMON += ["tests/stage6_ddp/test_programs.py", "tests/running/test_nccl_rules.py"]
TOO_LONG, TIMES_AS_LONG = 25.0, 6.0  # a test hangs that has run so many seconds, and so many times its own
TURNED = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt}
TURNED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And}
TURNED |= {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
LEFT_OUT = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Return)


# The mutants


def mutants(source):
    """Yield (lines of the statement, what was done, mutated source) for every fault, each in a tree of its own."""
    tree = ast.parse(source)
    nodes, lines_of = list(ast.walk(tree)), {}
    for statement in (node for node in nodes if isinstance(node, ast.stmt)):  # outer ones come first
        body = getattr(statement, "body", None)
        last = max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno
        for node in ast.walk(statement):
            lines_of[node] = range(statement.lineno, last + 1)
    for place, node in enumerate(nodes):
        for where, what, change in faults(node):
            twin = copy.deepcopy(tree)
            change(list(ast.walk(twin))[place])
            yield lines_of[where], what, ast.unparse(ast.fix_missing_locations(twin))


def faults(node):
    """Yield (changed node, description, function that changes such a node) for each fault that a node can have."""
    for field in ("body", "orelse", "finalbody"):
        for index, statement in enumerate(getattr(node, field, []) if isinstance(node, ast.stmt | ast.Module) else []):
            if isinstance(statement, LEFT_OUT) and not is_docstring(statement):
                yield statement, f"line {statement.lineno} left out", left_out(field, index)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
        yield node, f"{ast.unparse(node)} turned round", lambda twin: twin.ops.__setitem__(0, turned(twin.ops[0]))
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in TURNED:
        yield node, f"{ast.unparse(node)} with another operator", lambda twin: setattr(twin, "op", turned(twin.op))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, f"{node.value} turned round", lambda twin: setattr(twin, "value", not twin.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, f"{node.value} plus 1", lambda twin: setattr(twin, "value", twin.value + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"{ast.unparse(node)} without not", lambda twin: setattr(twin, "op", ast.UAdd())


def turned(operator):
    return TURNED[type(operator)]()


def left_out(field, index):
    """A function that replaces a statement of a body by nothing."""
    return lambda twin: getattr(twin, field).__setitem__(index, ast.Pass())


def is_docstring(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def all_of(file):
    """Every mutant of a file in an order drawn once."""
    named = file.relative_to(ROOT).as_posix()
    everything = [
        {"number": number, "file": named, "lines": lines, "what": what, "source": source}
        for number, (lines, what, source) in enumerate(mutants(file.read_text()))
    ]
    random.Random(0).shuffle(everything)
    return everything


# A run of pytest in a fork of this process


class Trial:
    """A fork of this process that runs `tests` in a copy of the repository; what it told is read from `told`."""

    def __init__(self, copied, tests, watched=()):
        self.copied, self.folder = copied, Path(tempfile.mkdtemp(prefix="trial_"))
        self.told, self.reached = self.folder / "told", self.folder / "reached"
        self.told.touch()
        self.reached.touch()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.play(tests, watched)
            finally:
                os._exit(70)

    def play(self, tests, watched):
        """In the fork: run pytest, with the lines of the files `watched` noted, and a server that has torch already."""
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(self.copied)
        for stream in (1, 2):
            os.dup2(os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.environ.pop("DDP_COURSE_TESTS", None)
        os.environ |= {"PYTHONPATH": str(self.copied), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the plugins of others take longer than most tests
        tempfile.tempdir, sys.path[0] = None, str(self.copied)
        if watched:
            watch(watched, self.reached)
        serve_forked(20 if watched else 1)  # a test may end its server, and the lines are to be noted in the next too
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests], plugins=[Teller(self.told)])
        import_module("ddp_course.running.launching.forked").stop_server()
        os._exit(int(code))

    def lines(self):
        """What the fork has told, line by line: [moment, "began", "failed" or seconds, test]."""
        return [line.split("\t") for line in self.told.read_text().splitlines()]

    def over(self, usual):
        """The exit status, None while it runs, "hung" if one test takes too long beside its `usual` seconds."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return self.close(os.waitstatus_to_exitcode(status))
        told = self.lines()
        since = float(told[-1][0]) if told else self.folder.stat().st_ctime
        test = told[-1][2] if told and told[-1][1] == "began" else ""
        if time.time() - since < max(TOO_LONG, TIMES_AS_LONG * usual.get(test, 10.0)):
            return None
        self.stop()
        return self.close("hung")

    def stop(self):
        """End it; the server ends with it, and every launch with the server."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def close(self, verdict):
        """Remember what was told, remove the folder, return `verdict`."""
        self.history = self.lines()
        self.notes = [line.split("\t") for line in self.reached.read_text().splitlines()]
        self.output = (self.folder / "output").read_text(errors="replace")
        shutil.rmtree(self.folder, ignore_errors=True)
        return verdict


class Teller:
    """A plugin that appends a line when a test begins, ends or fails."""

    def __init__(self, path):
        self.file = path.open("a", buffering=1)
        self.seconds = Counter()

    def pytest_collection_finish(self):
        """The forked server is no process left behind, although its command line is ours."""
        conftest = import_module("conftest")
        conftest.OWN = re.compile(f"{conftest.OWN.pattern}|{Path(__file__).name}")

    def pytest_runtest_logstart(self, nodeid):
        self.file.write(f"{time.time()}\tbegan\t{nodeid}\n")

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.file.write(f"{time.time()}\tfailed\t{report.nodeid}\n")

    def pytest_runtest_logfinish(self, nodeid):
        self.file.write(f"{time.time()}\t{self.seconds[nodeid]}\t{nodeid}\n")


def watch(files, path):
    """Append each line of `files` that this process, its threads or its forks reach, once for each test, to `path`."""
    seen, place = set(), {}

    def note(test, file, line):
        if (test, file, line) not in seen:
            seen.add((test, file, line))
            if place.get("pid") != os.getpid():
                place.update(pid=os.getpid(), fd=os.open(path, os.O_WRONLY | os.O_APPEND))
            os.write(place["fd"], f"{test}\t{file}\t{line}\n".encode())

    def enter(frame, event, _):
        file = files.get(frame.f_code.co_filename)
        if file is None:
            return None
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]

        def step(frame, event, _):
            if event == "line":
                note(test, file, frame.f_lineno)
            return step

        return step

    threading.settrace(enter)
    sys.settrace(enter)


def serve_forked(count):
    """The first `count` servers of this process will be forks of it as it is now: with torch, without the course."""
    waiting = [waiting_server() for _ in range(count)]
    forked = import_module("ddp_course.running.launching.forked")
    ordinary = forked.Server.begin

    def begin(server, control):
        if not waiting:
            return ordinary(server, control)
        socket_to_it, process = waiting.pop()
        with socket_to_it:
            socket.send_fds(socket_to_it, [b"."], [control.fileno()])
        return process

    forked.Server.begin = begin


def waiting_server():
    """A fork that will be a server as soon as it is sent a control socket, and a socket to send it with."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            os.setsid()
            _, (control,), _, _ = socket.recv_fds(theirs, 1, 1)  # none comes if the tests launch nothing
            os.dup2(control, 0)
            os.close(control)
            sys.argv = ["server.py"]
            runpy.run_path(str(Path.cwd() / SERVER), run_name="__main__")
        finally:
            os._exit(0)
    theirs.close()
    return ours, Fork(pid)


class Fork:
    """A forked process, as `subprocess.Popen` shows one."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def poll(self):
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout=float("inf")):
        until = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        return self.returncode

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


# Which tests a mutant meets


class Tests:
    """What a stage's tests take, and which of its lines each of them reaches."""

    def __init__(self, copied, stage):
        everything = [*TESTS[stage], *(path for path in COMMON if not path.startswith(tuple(TESTS[stage])))]
        folder = copied / "ddp_course" / stage
        files = folder.rglob("*.py") if folder.is_dir() else [folder]
        trial = Trial(copied, everything, {str(file): file.relative_to(copied).as_posix() for file in files})
        while (code := trial.over(defaultdict(lambda: 100.0))) is None:
            time.sleep(0.1)
        if code:
            raise SystemExit(
                f"{trial.output[-3000:]}\nwithout a fault the tests of {stage} end with {code}: no verdict"
            )
        self.seconds = {test: float(what) for _, what, test in trial.history if what not in ("began", "failed")}
        self.cost = defaultdict(float)  # the first of the tests that share a launch takes all its time
        for test, seconds in self.seconds.items():
            self.cost[launch_of(test)] = max(seconds, self.cost[launch_of(test)])
        self.reaching, self.kills = defaultdict(set), Counter()
        for test, file, line in trial.notes:
            self.reaching[file, int(line)].add(test)
        of_function, own = defaultdict(set), {test for tests in self.reaching.values() for test in tests}
        for test in self.seconds.keys() - own:  # shares the launch of another test of its function
            of_function[function(test)].add(test)
        for tests in self.reaching.values():
            for test in list(tests):
                tests |= of_function[function(test)]

    def of(self, mutant, budget):
        """The tests that reach a mutant, those that find most in the least time first, for `budget` seconds."""
        tests = set().union(*(self.reaching[mutant["file"], line] for line in mutant["lines"]))
        if "" in tests:  # when the file is imported, which every test of the stage does
            tests = set(self.seconds)
        by_function = defaultdict(list)
        for test in sorted(tests & self.seconds.keys(), key=lambda test: (self.cost[launch_of(test)], test)):
            by_function[function(test)].append(test)
        turn = {test: place for group in by_function.values() for place, test in enumerate(group)}
        chosen, left, paid = [], budget, set()
        for test in sorted(turn, key=lambda test: (turn[test], self.seconds_a_kill(test))):
            price = self.seconds[test] if launch_of(test) in paid else self.cost[launch_of(test)]
            if price <= left:
                chosen.append(test)
                left -= price
                paid.add(launch_of(test))
        return chosen

    def seconds_a_kill(self, test):
        """What the tests of a function have taken for a mutant that they killed, roughly."""
        return self.cost[launch_of(test)] / (1 + self.kills[function(test)])


def launch_of(test):
    """What tests may have in common: their function, and the world size that ends their name."""
    return function(test), test.rstrip("]").rpartition("-")[2][-1:]


def function(test):
    """A test's function: its name without parameters."""
    return test.partition("[")[0]


# The score


def score(copies, stage, report, args):
    """Try the next mutants of each file of a stage, or those again that survived, and write the report."""
    folder = ROOT / "ddp_course" / stage
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    chosen = [mutant for file in files for mutant in choose(file, report, args)]
    if not chosen:
        return
    found = verdicts(copies, Tests(copies[0], stage), chosen, args.budget)
    for mutant, verdict in zip(chosen, found, strict=False):  # fewer, where it was stopped
        report[mutant["file"]]["tried"] += not args.again
        survivors = report[mutant["file"]]["survivors"]
        known = survivors.pop(number := str(mutant["number"]), None)
        if verdict == "survived":
            survivors[number] = known or {"line": mutant["lines"][0], "what": mutant["what"], "why": ""}
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    if len(found) < len(chosen):
        raise SystemExit(f"stopped; {len(found)} verdicts are kept")


def choose(file, report, args):
    """The mutants of a file that are to be tried now; what is known of other versions of it is forgotten."""
    everything, digest = all_of(file), hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    name = file.relative_to(ROOT).as_posix()
    one = report.setdefault(name, {})
    if one.get("sources") != digest:
        report[name] = one = {"sources": digest, "of": len(everything), "tried": 0, "survivors": {}}
    if args.again:
        unexplained = {number for number, survivor in one["survivors"].items() if not survivor["why"]}
        return [mutant for mutant in everything if str(mutant["number"]) in unexplained]
    return everything[one["tried"] : None if args.count is None else one["tried"] + args.count]


def verdicts(copies, tests, chosen, budget):
    """ "killed", "hung" or "survived" for each mutant, as many beside each other as there are copies.

    Stopped by ctrl-c or SIGTERM, for the first ones, up to one of which it is not known yet.
    """
    found, running, free, waiting = [None] * len(chosen), {}, list(copies), list(enumerate(chosen))[::-1]
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    while (waiting or running) and not stopped:
        while free and waiting:
            number, mutant = waiting.pop()
            if names := tests.of(mutant, budget):
                copied = free.pop()
                write(copied / mutant["file"], mutant["source"])
                running[number] = Trial(copied, names)
            else:
                found[number] = "survived"
                print("survived, no test gets there: {file}:{lines[0]} {what}".format(**mutant), flush=True)
        for number, trial in list(running.items()):
            verdict = trial.over(tests.seconds)
            if verdict is None:
                continue
            mutant = chosen[number]
            found[number] = {0: "survived", "hung": "hung"}.get(verdict, "killed")
            by = trial.history[-1][2] if trial.history else "the import"
            if found[number] != "survived":
                tests.kills[function(by)] += 1
            print(f"{found[number]}: {mutant['file']}:{mutant['lines'][0]} {mutant['what']} ({by})", flush=True)
            write(trial.copied / mutant["file"], (ROOT / mutant["file"]).read_text())
            free.append(trial.copied)
            del running[number]
        time.sleep(0.02)
    for trial in running.values():
        trial.stop()
        trial.close("stopped")
    return list(takewhile(bool, found))


moments = iter(range(10**9, 2 * 10**9))  # each file written gets another, so that no compiled file is taken for its own


def write(path, source):
    """Write a source file, with a time that no other version has had."""
    path.write_text(source)
    os.utime(path, (moment := next(moments), moment))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a part of the name of a stage")
    parser.add_argument("--count", type=int, help="so many more mutants of each stage; default: all")
    parser.add_argument("--again", action="store_true", help="only what survived and nobody has explained")
    parser.add_argument("--jobs", type=int, default=1, help="mutants beside each other")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests that one mutant meets at most")
    args = parser.parse_args()
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    for name in LOADED.split():
        import_module(name)
    import_module("ddp_course.running.linux").take_large_pages()
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        copies = [Path(folder, str(number)) for number in range(args.jobs)]
        for copied in copies:
            for part in PARTS:
                source, target = ROOT / part, copied / part
                target.parent.mkdir(exist_ok=True)
                (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        for stage in (stage for stage in TESTS if args.only in stage):
            score(copies, stage, report, args)
    tried = sum(one["tried"] for one in report.values())
    killed = tried - sum(len(one["survivors"]) for one in report.values())
    print(f"{killed} of {tried} killed, {killed / max(1, tried):.1%}, of {sum(one['of'] for one in report.values())}")
    return 0 if killed >= 0.95 * tried else 1


if __name__ == "__main__":
    sys.exit(main())
