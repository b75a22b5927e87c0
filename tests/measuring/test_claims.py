"""The claims: verdicts follow from what was found, and change when the condition is flipped."""

import inspect
import json
import re

import pytest
import torch
import torch.distributed as dist

from ddp_course import collectives, launch, stage4_ring
from ddp_course.cli import main
from ddp_course.measuring import claims, theory
from ddp_course.measuring.claims import Claim, Finding, Outcome, averaging, communication, running, verdict_on
from ddp_course.measuring.simulate import Network, play
from ddp_course.measuring.simulate.replay import replay

CLAIMS = claims.all_claims()
CLOCKS = re.compile(r"perf_counter|time\.time|monotonic|process_time|thread_time")
MAY_READ_CLOCKS = {"turns_of_another", "cost_on_rank"}  # which of two moments came first; a remark beside what counts


def test_they_are_numbered_without_gaps():
    assert list(CLAIMS) == list(range(1, len(CLAIMS) + 1)) and len(CLAIMS) >= 20


@pytest.mark.parametrize("number", CLAIMS)
def test_verdict_is_found_and_flips_with_the_condition(number):
    claim = CLAIMS[number]
    everything = claim.test([*claim.conditions, *claim.controls])
    stated = Finding(claim, {name: everything.outcomes[name] for name in claim.conditions})
    assert stated.verdict == claim.expected, stated.numbers
    alone = {Finding(claim, {name: outcome}).verdict.split(" if ")[0] for name, outcome in everything.outcomes.items()}
    assert alone == {"holds", "false"}, "some condition must make the claim true and some other one false"
    assert all(outcome.number for outcome in everything.outcomes.values())


def test_no_verdict_hangs_on_the_clock():
    """Verdicts are printed in checks, so they must be the same on a slow and a busy machine."""
    for module in (averaging, communication, running):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and name not in MAY_READ_CLOCKS:
                assert not CLOCKS.search(inspect.getsource(function)), name
        assert "time_collective" not in vars(module)


def test_what_is_simulated_says_so():
    for claim in CLAIMS.values():
        simulated = any("simulate" in inspect.getsource(function) or "replay" in inspect.getsource(function)
                        for function in (experiment.func for experiment in claim.conditions.values()))  # fmt: skip
        assert (claim.kind == "simulated") == simulated, claim.number


def test_a_finding_says_what_it_is_in_every_form():
    finding = CLAIMS[14].test()
    assert finding.line == f"Claim 14 (measured): {CLAIMS[14].expected}"
    page = claims.test(14, 13)._repr_html_()
    assert page.count("<table>") == 2 and "measured" in page and "counted" in page and CLAIMS[13].text in page
    assert "measured: " in repr(finding) and "<b>" not in repr(finding)
    assert "e-&NoBreak;0" in page and not re.search(r"e-\d", page), "a browser may break 3e-01 behind its minus"
    with pytest.raises(ValueError, match="one of measured, counted, simulated, derived"):
        Claim(99, "x", "guessed", {}, "holds", "why")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ["ring", "whole_gradient_ring", "tree", "halving_doubling"])
def test_replayed_messages_take_the_seconds_of_the_formula(algorithm, world_size):
    own = {
        "ring": stage4_ring.ring_all_reduce,
        "whole_gradient_ring": stage4_ring.whole_gradient_ring,
        "tree": collectives.tree_all_reduce,
        "halving_doubling": collectives.halving_doubling_all_reduce,
    }
    costs = theory.Costs(1e-3, 1e-8)
    seconds = replay(own[algorithm], 12 * 2**16, world_size, Network(costs))
    assert seconds == pytest.approx(theory.seconds(algorithm, 12 * 2**16, world_size, costs), rel=1e-6)


@pytest.mark.parametrize("world_size", [4, 6])
def test_halving_and_doubling_has_the_partners_that_the_simulator_gives_it(world_size):
    """On hosts of 2 it counts who the partners are: with the farthest first, the largest halves would share a cable."""
    network = Network(theory.Costs(1e-3, 1e-8), theory.Costs(1e-4, 1e-9), per_host=2)
    seconds = replay(collectives.halving_doubling_all_reduce, 12 * 2**16, world_size, network)
    assert seconds == pytest.approx(play("halving_doubling", 12 * 2**16, world_size, network), rel=1e-6)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_duplex_server_adds_up_and_takes_half_the_time(world_size):
    assert all(launch(sums_like_torch, world_size=world_size, device="cpu"))
    costs = theory.Costs(0, 1e-8)
    seconds = replay(collectives.duplex_server_all_reduce, 2**20, world_size, Network(costs))
    assert seconds < 0.56 * theory.seconds("parameter_server", 2**20, world_size, costs)


def sums_like_torch():
    mine = torch.arange(1001.0) * (dist.get_rank() + 1)
    theirs = mine.clone()
    dist.all_reduce(theirs)
    return torch.equal(collectives.duplex_server_all_reduce(mine), theirs)


def test_words_follow_the_outcomes():
    yes, no = Outcome(True, "1"), Outcome(False, "2")
    assert verdict_on({"a": yes, "b": yes}) == "holds"
    assert verdict_on({"a": no, "b": no}) == "false"
    assert verdict_on({"a": yes, "b": no}) == "holds only if a"
    assert verdict_on({"a": yes, "b": no, "c": yes}) == "holds only if a or c"
    assert verdict_on({"K = 2": yes, "K = 16": yes, "K = 64": no}) == "holds up to K = 16"
    assert verdict_on({"K = 2": yes, "K = 16": no, "K = 64": yes}) == "holds only if K = 2 or K = 64"
    assert verdict_on({"K = 2": yes, "K = 4": no}) == "holds only if K = 2"


def test_a_claim_runs_only_what_it_is_asked_for():
    ran = []

    def experiment(name, holds):
        return lambda: ran.append(name) or Outcome(holds, name)

    claim = Claim(99, "x", "counted", {"a": experiment("a", True)}, "holds", "why", {"b": experiment("b", False)})
    assert claim.test().line == "Claim 99 (counted): holds" and ran == ["a"]
    assert claim.test(["b"]).line == "Claim 99 (counted): false" and ran == ["a", "b"]


def test_command_prints_verdicts_and_writes_json(tmp_path, capsys):
    file = tmp_path / "claims.json"
    assert main(["claims", "13", "14", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert CLAIMS[13].expected in printed and CLAIMS[14].expected in printed and "2 claims tested" in printed
    assert [record["verdict"] for record in json.loads(file.read_text())] == [CLAIMS[13].expected, CLAIMS[14].expected]


def test_unknown_claim_is_refused_in_one_line(capsys):
    assert main(["claims", "21"]) == 2
    assert "there is no claim 21; choose 1 to 20" in capsys.readouterr().err
