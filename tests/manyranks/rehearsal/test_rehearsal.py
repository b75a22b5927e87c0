"""Unmodified scripts for torchrun run on many ranks, with values and with sizes only, and the
report says what they did.
"""

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from manyranks import Device
from manyranks.__main__ import main
from manyranks.clocks.recording import Call
from manyranks.clocks.stalls import Line
from manyranks.errors import EmulationError, ManyranksError, RankError
from manyranks.rehearsal import Report, Request, rehearse, spans
from manyranks.rehearsal.report import duration
from manyranks.rehearsal.script import RankRecord

SCRIPTS = Path(__file__).with_name("scripts")
DEVICE = Device("100GFLOP/s", "20GB/s", streams=True)


def report_of(name, *arguments, sizes_only=False, **options):
    request = Request(2, DEVICE, link="1Gbit", sizes_only=sizes_only, **options)
    return rehearse(str(SCRIPTS / f"{name}.py"), list(arguments), request)


WEIGHTS = 128 * 129  # of a layer of the model in fsdp2.py; a rank has half of them
FOUND = {  # What a step of each script sends: how often, and how many bytes from rank 0.
    "ddp": {"all_reduce": (1, 4 * (65 * 256 + 257 * 10))},
    "fsdp2": {
        "all_gather": (8, 8 * 2 * WEIGHTS / 2),
        "reduce_scatter": (4, 4 * 4 * WEIGHTS / 2),
        "all_reduce": (1, 4 * 8),
    },
    "tensor_parallel": {"all_reduce": (1, 4 * 8 * 64)},
    "pipeline": {"send": (4, 4 * 4 * 8 * 64), "receive": (4, 4 * 4 * 8 * 64)},
    "checkpoint": {
        "all_gather": (4, 4 * 4 * 65 * 64 / 2),
        "reduce_scatter": (2, 2 * 4 * 65 * 64 / 2),
    },
    "prefetch": {  # One replica has nobody to average with.
        "all_gather": (8, 8 * 4 * 65 * 64 / 2),
        "reduce_scatter": (4, 4 * 4 * 65 * 64 / 2),
        "all_reduce": (4, 0),
    },
    # A rank's half of the sequences is 4 samples of 16 positions.
    "two_ways": {
        "all_gather": (4, 4 * 4 * 4 * 16 * 64),
        "reduce_scatter": (4, 4 * 4 * 4 * 16 * 64),
        "all_reduce": (4, 4 * 4 * 64),
    },
    "zero": {"all_reduce": (1, 4 * 2 * 65 * 64), "broadcast": (4, 4 * 2 * 65 * 64)},
}


@pytest.mark.parametrize("name", [name for name in FOUND if name != "two_ways"])
def test_a_script_takes_the_same_time_with_values_and_without(name, tmp_path):
    options = [str(tmp_path)] if name == "checkpoint" else []
    real = report_of(name, *options)
    sizes = report_of(name, *options, sizes_only=True)
    assert real.steps == sizes.steps
    assert real.sites == sizes.sites
    expect_what_is_found(real, name)


def test_with_sizes_only_torch_waits_at_once_for_activations_of_divided_layers():
    real = report_of("two_ways")
    sizes = report_of("two_ways", sizes_only=True)
    expect_what_is_found(real, "two_ways")
    expect_what_is_found(sizes, "two_ways")
    assert real.last.computing == sizes.last.computing
    assert real.last.seconds == pytest.approx(sizes.last.seconds, rel=0.01)


def expect_what_is_found(real, name):
    """Check the parts of a report, and what its script sends in a step."""
    assert len(real.steps) >= 3
    step = real.last
    parts = step.computing + step.exposed + step.waiting
    assert step.seconds == pytest.approx(parts, abs=1e-11)
    assert step.hidden + step.exposed > 0 < step.computing
    assert not list(real.mistakes()), real.words()
    times = Counter()
    nbytes = Counter()
    for site in real.sites_of(real.steps[-1][0]):
        times[site.name] += site.times
        nbytes[site.name] += site.nbytes
    assert {what: (times[what], nbytes[what]) for what in times} == FOUND[name]


def test_accumulation_sends_once_and_workers_take_no_time_of_the_device():
    every = report_of("ddp", sizes_only=True)
    more = ("--epochs", "2", "--accumulate", "2", "--workers", "1")
    second = report_of("ddp", *more, sizes_only=True)
    assert len(every.steps) == len(second.steps) == 4
    assert [site.times for site in second.sites] == [site.times for site in every.sites] == [1]
    assert second.last.computing > 1.2 * every.last.computing
    assert second.last.hidden + second.last.exposed == every.last.hidden + every.last.exposed


@pytest.mark.parametrize(
    ("name", "ranks", "hosts"), [("ddp", 4, 2), ("fsdp2", 3, 1), ("zero", 4, 2)]
)
def test_a_rank_of_two_is_what_it_is_among_all(name, ranks, hosts):
    """Each moment of rank 0 is the same, and with it all that is derived from them.

    Three ranks have shards of 43, 43 and 42 rows.
    """
    request = {"link": "NVLink", "hosts": hosts, "between": "10Gbit", "latency": "5us"}
    request |= {"sizes_only": True}
    script = str(SCRIPTS / f"{name}.py")
    every = rehearse(script, [], Request(ranks, DEVICE, **request))
    folded = rehearse(script, [], Request(ranks, DEVICE, **request, fold=True))
    assert len(folded.records) == 1
    assert len(folded.records[0].steps) >= 2
    assert vars(folded.records[0]) == vars(every.records[0])
    assert [ranks[0] for ranks in every.steps] == [ranks[0] for ranks in folded.steps]


def test_ranks_that_are_not_alike_are_not_folded(tmp_path):
    def folded(path, **options):
        return rehearse(str(path), [], Request(4, DEVICE, sizes_only=True, fold=True, **options))

    with pytest.raises(RankError, match=r"none sends to another one.*leave out --fold"):
        folded(SCRIPTS / "pipeline.py")
    unlike = tmp_path / "unlike.py"
    begin = (
        "import torch, torch.distributed as dist\ndist.init_process_group()\nx = torch.ones(99)\n"
    )
    for line, words in (
        ("if dist.get_rank(): dist.all_reduce(x)", "rank 3 waits.*rank 0 has returned"),
        ("x = x[dist.get_rank():]", "rank 3 calls all_reduce of 576 bytes"),
    ):
        unlike.write_text(f"{begin}{line}\ndist.all_reduce(x)\n")
        with pytest.raises(ManyranksError, match=words):
            folded(unlike, link="1Gbit")
    with pytest.raises(EmulationError, match="sizes-only"):
        Request(4, DEVICE, fold=True)
    one_more = "if dist.get_rank(): dist.all_reduce(x, async_op=True)"
    unlike.write_text(f"{begin}dist.all_reduce(x)\n{one_more}\n")
    with pytest.raises(EmulationError, match=r"rank 0 calls nothing more, rank 3 calls all_reduce"):
        folded(unlike, link="1Gbit")
    unlike.write_text(f"{begin}if dist.get_rank(): x.mul_(2)\ndist.all_reduce(x)\n")
    every = rehearse(str(unlike), [], Request(4, DEVICE, sizes_only=True, link="1Gbit"))
    assert folded(unlike, link="1Gbit").records[0] == every.records[0], (
        "all wait for the slower ones"
    )


def test_a_failure_of_the_last_of_folded_ranks_has_its_number(tmp_path, capsys):
    script = tmp_path / "fails.py"
    begin = "import torch, torch.distributed as dist\ndist.init_process_group()\n"
    x = "x = torch.ones(9, device='cuda')\nlast = dist.get_rank() == 7\n"
    stalls = "from manyranks.clocks import stalls\nstalls.PATIENCE_S = 0.1\nwhile last: pass"
    options = ["--ranks", 8, "--device", "H100", "--sizes-only", "--fold", "--timeout", 2]
    for line, words in (
        ("if last: raise ValueError('bad shard 1')", "rank 7: ValueError: bad shard 1 (of 8 ranks"),
        ("if last: torch.ones(10**12, device='cuda')", "rank 7: OutOfMemoryError: out of memory"),
        ("if not last: dist.all_reduce(x)", "rank 0 waits for ranks [0, 7] in all_reduce"),
        ("if last: dist.barrier()", "rank 7 waits for ranks [0, 7] in barrier"),
        ("while last: pass", "rank 7 has not entered torch.distributed.all_reduce"),
        (stalls, "[rank 7] virtual time stands still: rank 7 holds up all others, fails.py line 7"),
    ):
        script.write_text(f"{begin}{x}{line}\ndist.all_reduce(x)\n")
        assert run(*options, script) == 1
        told = capsys.readouterr().err
        assert words in told
        assert "rank 1" not in told
        assert "1]" not in told
        assert told.endswith("The first and the last rank were run, the others are their copies.\n")


def test_a_question_for_a_value_is_refused_or_answered():
    with pytest.raises(RankError, match=r"reads_its_loss.py line \d+: print.*--answer 0"):
        report_of("reads_its_loss", sizes_only=True)
    assert len(report_of("reads_its_loss", sizes_only=True, answer=0.0).steps) == 2


def test_a_scaler_asks_whether_gradients_are_finite():
    real = report_of("scaler")
    with pytest.raises(RankError, match=r"scaler.py line 22: scaler.step\(optimizer\) asks for"):
        report_of("scaler", sizes_only=True)
    answered = report_of("scaler", sizes_only=True, answer=0.0)
    assert answered.sites == real.sites
    assert len(answered.steps) == 3


def run(*words):
    return main(["run", *map(str, words)])


def test_the_command_writes_a_report_a_trace_and_a_line_for_github(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    kept = tmp_path / "report.json"
    script = SCRIPTS / "ddp.py"
    setting = ["--ranks", 4, "--hosts", 2, "--device", "H100", "--link", "NVLink"]
    setting += ["--between", "100Gbit", "--sizes-only"]
    files = ["--report", kept, "--trace", tmp_path / "trace.json"]
    files += ["--picture", tmp_path / "step.svg"]
    assert run(*setting, *files, script, "--epochs", "2") == 0
    printed = capsys.readouterr().out
    assert "hidden" in printed
    assert "all_reduce of 4 ranks, ddp.py line" in printed
    assert f"::notice file={script},title=manyranks run::step" in printed
    report = json.loads(kept.read_text())
    assert report["request"]["link"]["inside_bits_s"] == 8 * 450e9
    assert report["summary"]["collectives"] == 1
    assert report["summary"]["step_s"] > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert any(event.get("args", {}).get("bytes") for event in events)
    drawn = ElementTree.fromstring((tmp_path / "step.svg").read_text())
    texts = [each.text for each in drawn if each.text]
    assert texts[0].startswith("step ")
    assert {"rank 0", "rank 3", "computing"} <= set(texts)
    assert run(*setting, "--expect", kept, script, "--epochs", "2") == 0
    report["summary"]["collectives"] = 2
    kept.write_text(json.dumps(report))
    assert run(*setting, "--expect", kept, script, "--epochs", "2") == 3
    assert "collectives is 1, and was 2" in capsys.readouterr().err


def test_a_script_that_fails_ends_with_1_and_a_request_that_cannot_be_with_2(tmp_path, capsys):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import sys\n\nif len(sys.argv) < 2:\n    raise OSError('no data')\n")
    setting = ["--ranks", 2, "--device", "H100"]
    assert run(*setting, wrong) == 1
    said = capsys.readouterr().err
    assert "OSError: no data" in said
    assert 'wrong.py", line 4' in said
    assert "script.py" not in said, "our own frames are not shown"
    assert run(*setting, wrong, "anything") == 0
    printed = capsys.readouterr().out
    assert "no optimizer made a step" in printed
    assert "never calls init_process_group" in printed
    for words, option in (
        ("no file", [tmp_path / "none.py"]),
        ("--between 100Gbit", ["--hosts", 2, wrong]),
        ("evenly", ["--hosts", 3, "--between", "1Gbit", wrong]),
        ("NVLink V100", ["--link", "wet string", wrong]),
        ("leave out --sizes-only", ["--sizes-only", "--orders", wrong, "anything"]),
    ):
        assert run(*setting, *option) == 2
        assert words in capsys.readouterr().err


def test_a_module_runs_as_torchrun_runs_it(tmp_path, monkeypatch, capsys):
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "settings.py").write_text("ranks = 2\n")
    train = "from .settings import ranks\nimport torch.distributed as dist\n"
    train += "dist.init_process_group()\nassert dist.get_world_size() == ranks\n"
    train += "import torch\ndist.all_reduce(torch.ones(3))\n"
    train += "p = torch.ones(3, requires_grad=True)\np.sum().backward()\n"
    train += "torch.optim.SGD([p], 1).step()\n"
    (package / "train.py").write_text(train)
    monkeypatch.chdir(tmp_path)
    assert run("--ranks", 2, "--device", "H100", "--link", "1Gbit", "-m", "training.train") == 0
    assert "all_reduce of 2 ranks, train.py line 6" in capsys.readouterr().out
    assert run("--ranks", 2, "--device", "H100", "-m", "training.nowhere") == 2
    assert "there is no module training.nowhere" in capsys.readouterr().err


def test_orders_are_tried_too(tmp_path, capsys):
    racy = tmp_path / "racy.py"
    racy.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.ones(1000)\n"
        "work = dist.all_reduce(x, async_op=True)\n"
        "print(x.sum())\n"
        "work.wait()\n"
    )
    assert run("--ranks", 2, "--device", "H100", "--link", "1Gbit", "--orders", racy) == 3
    assert "racy.py line 5" in capsys.readouterr().out


def test_what_a_link_by_name_is_depends_on_the_device():
    for device, gigabytes in (("A100", 300), ("H100", 450), ("L40S", 450)):
        request = Request(4, Device(device), link="NVLink")
        assert request.emulated.bandwidth == 8e9 * gigabytes
    two = Request(4, Device("A100"), link="NVLink", hosts=2, between="100Gbit")
    assert (two.emulated.inside, two.emulated.bandwidth, two.per_host) == (2.4e12, 1e11, 2)
    with pytest.raises(EmulationError, match="how many"):
        Request(4, Device("A100"), between="100Gbit")


def test_spans_worked_out_by_hand():
    assert spans.union([(5, 7), (0, 2), (1, 3), (4, 4)]) == [(0, 3), (5, 7)]
    assert spans.within([(0, 3), (5, 7)], 2, 6) == [(2, 3), (5, 6)]
    assert spans.outside([(0, 3), (5, 7)], [(1, 6)]) == 2


def test_the_parts_of_a_step_worked_out_by_hand():
    """In the second step of two ranks rank 0 computes for 4 us of 10, and sends for 5, of which 2
    are hidden.
    """
    us = 1_000_000
    line = Line("train.py", 3, "loss.backward()")
    record = RankRecord(steps=[10 * us, 20 * us], busy={0: [(10 * us, 14 * us)]}, made_group=True)
    record.calls = [
        Call("all_reduce", (0, 1), 100.0, 5 * us, 11 * us, line, 17 * us),
        Call("broadcast", (0, 1), 7.0, 1 * us, 1 * us, line, 3 * us),
        Call("send", (0, 1), 7.0, 1 * us, 12 * us, line),
    ]
    other = RankRecord(steps=[10 * us, 19 * us], busy={1: [(10 * us, 19 * us)]}, made_group=True)
    report = Report("train.py", {}, [record, other])
    step = report.last
    assert (step.rank, step.seconds) == (0, pytest.approx(10e-6))
    parts = (step.computing, step.hidden, step.exposed, step.waiting)
    assert parts == pytest.approx((4e-6, 2e-6, 3e-6, 3e-6))
    [site] = report.sites
    assert (site.name, site.times, site.nbytes) == ("all_reduce", 1, 100.0)
    assert (site.seconds, site.exposed) == pytest.approx((5e-6, 3e-6))
    words = report.words()
    assert "others wait up to 3.000 µs for rank 1" in words
    assert "       1       100 B     5.000 µs     3.000 µs  all_reduce of 2 ranks" in words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.000 µs"),
        (2e-9, "0.002 µs"),
        (170.4e-6, "170.400 µs"),
        (1e-3, "1.000 ms"),
        (0.510024, "510.024 ms"),
        (1.5, "1.500 s"),
        (7200, "7,200.000 s"),
    ],
)
def test_a_duration_has_the_unit_that_shows_its_digits(seconds, text):
    assert duration(seconds) == text
