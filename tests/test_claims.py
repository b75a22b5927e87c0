"""The twenty claims: verdicts follow from what was measured, and change when the condition is flipped."""

import json

import pytest

from ddp_course.cli import main
from ddp_course.measuring import claims
from ddp_course.measuring.claims import Claim, Finding, Outcome, judge
from ddp_course.measuring.claims.communication import published_efficiency

pytestmark = pytest.mark.alone

EXPECTED = {
    1: "holds only if the loss is a sum",
    2: "holds only if K = 2",
    3: "holds only if the message is large",
    4: "holds only if it collects everything before it sends",
    5: "holds only if the work is Python code",
    6: "holds only if parameters go unused",
    7: "holds only if nobody broadcasts",
    8: "holds only if parameters and state are sharded",
    9: "holds only if K = 2 or K = 16 or K = 128",
    10: "holds",
    11: "holds only if there is nothing to hide it behind",
    12: "holds only if the forward pass is inside too",
    13: "holds only if set_epoch is called",
    14: "holds only if all shards are equally large",
    15: "holds only if it is SyncBatchNorm",
    16: "holds only if nothing is large enough to be clipped",
    17: "false",
    18: "false",
    19: "holds only if all parameters are used",
    20: "holds only if K = 2",
}


def test_all_twenty_are_there():
    assert list(claims.all_claims()) == list(range(1, 21)) == list(EXPECTED)


@pytest.mark.parametrize("number", EXPECTED)
def test_verdict_is_measured_and_flips_with_the_condition(number):
    claim = claims.all_claims()[number]
    everything = claim.test([*claim.conditions, *claim.controls])
    stated = Finding(claim, {name: everything.outcomes[name] for name in claim.conditions})
    assert stated.verdict == EXPECTED[number], stated.numbers
    alone = {Finding(claim, {name: outcome}).verdict.split(" if ")[0] for name, outcome in everything.outcomes.items()}
    assert alone == {"holds", "false"}, "some condition must make the claim true and some other one false"
    assert all(outcome.number for outcome in everything.outcomes.values())


def test_judge_words_follow_the_outcomes():
    yes, no = Outcome(True, "1"), Outcome(False, "2")
    assert judge({"a": yes, "b": yes}) == "holds"
    assert judge({"a": no, "b": no}) == "false"
    assert judge({"a": yes, "b": no}) == "holds only if a"
    assert judge({"a": yes, "b": no, "c": yes}) == "holds only if a or c"


def test_a_claim_runs_only_what_it_is_asked_for():
    ran = []

    def experiment(name, holds):
        return lambda: ran.append(name) or Outcome(holds, name)

    claim = Claim(99, "x", "00", {"a": experiment("a", True)}, "why", {"b": experiment("b", False)})
    assert claim.test().line == "Claim 99: holds" and ran == ["a"]
    assert claim.test(["b"]).line == "Claim 99: false" and ran == ["a", "b"]


def test_published_efficiencies_fall_with_the_number_of_gpus():
    rows = ["model,no_ddp,gpus_1,gpus_16", "resnet50,0.097,0.100,0.104"]
    assert published_efficiency(rows) == {"resnet50": {1: pytest.approx(0.97), 16: pytest.approx(0.097 / 0.104)}}


def test_command_prints_verdicts_and_writes_json(tmp_path, capsys):
    file = tmp_path / "claims.json"
    assert main(["claims", "13", "14", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert EXPECTED[13] in printed and EXPECTED[14] in printed and "2 claims tested" in printed
    assert [record["verdict"] for record in json.loads(file.read_text())] == [EXPECTED[13], EXPECTED[14]]


def test_unknown_claim_is_refused_in_one_line(capsys):
    assert main(["claims", "21"]) == 2
    assert "there is no claim 21; choose 1 to 20" in capsys.readouterr().err
