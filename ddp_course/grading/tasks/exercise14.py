"""Exercise 14: send the largest, meet less often, find the hook that loses gradients, and bet on a winner."""

import torch
import torch.distributed as dist

from ...stage4_ring import ring_all_reduce
from ..probing import worlds
from . import require, task
from .diagnose import check_line, compare_numbers, compare_ranks, number, same, tensors


@task("14.1", "compress")
class Compress:
    """The largest values and their places, with error feedback."""

    def draw(random, hidden):
        """Five gradients in a row, with a share; shares of which nothing would be left, too, if `hidden`."""
        cases = [(tensors(random, 5, 40), 0.1), (tensors(random, 5, 25), 0.2)]
        return {"cases": cases + [(tensors(random, 5, 9), 0.01)] * hidden}

    def probe(compress, cases):
        """What is sent and what is left in each step, and the gradient afterwards."""
        evidence = []
        for gradients, share in cases:
            left, steps = torch.zeros(len(gradients[0])), []
            for gradient in gradients:
                given = gradient.clone()
                values, places, left = compress(given, left, share)
                steps.append({"values": values, "places": places, "left": left, "given": given})
            evidence.append(steps)
        return evidence

    def judge_largest(evidence, cases):
        """In the first step, when nothing is left from before, the largest by magnitude travel, with their sign."""
        for (gradients, share), steps in zip(cases, evidence, strict=True):
            check_sent(steps[0], gradients[0], share, f"{len(gradients[0])} values, share {share:g}, step 1")

    def judge_feedback(evidence, cases):
        """What is not sent is added to the next gradient, and is left until it is sent."""
        for (gradients, share), steps in zip(cases, evidence, strict=True):
            owed = torch.zeros(len(gradients[0]))
            for step, (gradient, one) in enumerate(zip(gradients, steps, strict=True), 1):
                about = f"{len(gradient)} values, share {share:g}, step {step}"
                owed = owed + gradient
                places = check_sent(one, owed, share, about)
                whole, owed = owed, owed.index_fill(0, places, 0.0)
                guesses = [
                    ("what was sent must be gone from what is left", [whole]),
                    ("nothing is left: keep all that was not sent", [torch.zeros_like(owed)]),
                    ("that is what was sent; what was not sent is to be kept", [whole - owed]),
                    ("what was left before is missing", [gradient.index_fill(0, places, 0.0)]),
                ]
                compare_ranks([one["left"]], [owed], f"{about}, what is left", guesses, 1e-5, "what was not sent")
                require(same(one["given"], gradient), f"{about}: the gradient was changed (aliasing): work on a copy")

    parts = {"largest": (1, judge_largest), "feedback": (2, judge_feedback)}


def check_sent(one, gradient, share, about):
    """Values and places of the largest of `gradient`; returns the places."""
    count, values, places = max(1, round(share * len(gradient))), one["values"], one["places"]
    for thing, what in ((values, "values"), (places, "places")):
        require(
            isinstance(thing, torch.Tensor) and thing.dim() == 1, f"{about}: {what}: a tensor in one row was expected"
        )
    said = f"{about}: {len(values)} values and {len(places)} places; max(1, round(share * n)) = {count} were expected"
    require(len(values) == len(places) == count, said)
    require(not places.is_floating_point(), f"{about}: places are {places.dtype}; they are integers")
    found, best = set(places.tolist()), gradient.abs().topk(count).indices.tolist()
    signed = set(gradient.topk(count).indices.tolist())
    require(found == set(best) or found != signed, f"{about}: large negative values are never sent: go by magnitude")
    missing = f"place {min(set(best) - found, default='')} is missing, one of the {count} largest"
    require(found == set(best), f"{about}: {missing} of gradient + left")
    sent = gradient[places.long()]
    guesses = [("they have lost their sign", [sent.abs()])]
    compare_ranks([values], [sent], f"{about}, the values", guesses, 1e-5, "the values at these places")
    return places.long()


@task("14.2", "meet", ranks=4, private=("own",))
class Meet:
    """Local SGD's meeting, with DiLoCo's outer step."""

    def draw(random, hidden):
        """Shared weights, each rank's own after some steps alone, a velocity, and pairs of rate and momentum."""
        settings = [(1.0, 0.0), (0.7, 0.0), (0.5, 0.9)]
        return {
            "shared": tensors(random, 1, 30)[0],
            "own": tensors(random, 4, 30),
            "velocity": tensors(random, 1, 30)[0],
            "settings": settings + [(random.uniform(0.1, 2), random.uniform(0.1, 0.9))] * hidden,
        }

    def probe(meet, shared, own, velocity, settings):
        """The new weights and velocity of every rank, and how much was reduced."""
        evidence = {}
        for size, group in worlds(2, 3):
            for index, (rate, momentum) in enumerate(settings):
                calls = []

                def all_reduce(tensor, group=group, calls=calls):
                    calls.append(tensor.numel())
                    return ring_all_reduce(tensor, group)

                mine, speed = own[dist.get_rank()].clone(), velocity.clone()
                result = meet(shared.clone(), mine, speed, all_reduce, size, rate, momentum)
                evidence[size, index] = {"result": result, "calls": calls}
        return evidence

    def judge_local(evidence, shared, own, velocity, settings):
        """Rate 1 without momentum: everybody goes on from the mean, after one all-reduce."""
        check_meeting(evidence, shared, own, velocity, list(enumerate(settings))[:1])

    def judge_outer(evidence, shared, own, velocity, settings):
        """Other rates, and momentum: the mean change is a gradient, and the velocity comes back too."""
        check_meeting(evidence, shared, own, velocity, list(enumerate(settings))[1:])

    parts = {"local SGD": (1, judge_local), "outer step": (1, judge_outer)}


def check_meeting(evidence, shared, own, velocity, settings):
    """New weights and velocities on all ranks, for some of the settings."""
    for size in (2, 3):
        mean = sum(own[:size]) / size
        for index, (rate, momentum) in settings:
            about = f"with {size} ranks, rate {rate:g}, momentum {momentum:g}"
            found = [evidence[rank][size, index] for rank in range(size)]
            pairs = [isinstance(one["result"], tuple | list) and len(one["result"]) == 2 for one in found]
            require(all(pairs), f"{about}: return a pair: (weights, velocity)")
            calls = [len(one["calls"]) for one in found]
            require(calls == [1] * size, f"{about}: {calls[0]} all-reduces; one is enough")
            change = shared - mean
            speed = momentum * velocity + change
            weights = shared - rate * speed
            guesses = [
                ("that is each rank's own: they have not met", own[:size]),
                ("the shared weights have not changed", [shared] * size),
                ("they move away from the mean: the change is shared - mean", [shared + rate * speed] * size),
                (
                    "that is the sum of the changes: divide by K",
                    [shared - rate * (momentum * velocity + size * change)] * size,
                ),
                ("the rate is missing", [shared - speed] * size),
                ("the momentum is missing", [shared - rate * change] * size),
                ("that is the mean itself: the outer step goes on from the shared weights", [mean] * size),
            ]
            compare_ranks(
                [one["result"][0] for one in found], [weights] * size, f"{about}, the weights", guesses, 1e-5, "all"
            )
            old = [("the velocity has not changed: return the new one", [velocity] * size)]
            old += [("the velocity holds the rate already; it is applied to the weights only", [rate * speed] * size)]
            compare_ranks(
                [one["result"][1] for one in found], [speed] * size, f"{about}, the velocity", old, 1e-5, "all"
            )


LINES = {
    1: "that line only names what it is given",
    2: "what is kept begins empty, and that is right",
    4: "this is the feedback, and it is right: what was kept is added",
    5: "the number of values is right",
    7: "this makes room for what is sent, and does",
    8: "this takes the values at the places it is given: are they the right places?",
    9: "what was not sent is kept: right. But some of it is kept for ever: why?",
}


@task("14.3", ("the_bug", "make_hook"))
class FindTheLossyHook:
    """A hook that never sends what is large and negative."""

    def draw(random, hidden):
        """Gradients of two parameters over 40 steps, mostly of one sign each."""
        drifts = [tensors(random, 1, 24)[0] for _ in range(2)]
        return {"drifts": drifts, "noise": [tensors(random, 40, 24) for _ in range(2)]}

    def probe(the_bug, make_hook, drifts, noise):
        """The line that is named, and per parameter what was sent in each step."""
        hook, sent = make_hook(0.25), [[], []]
        for step in range(40):
            for number_of, drift in enumerate(drifts):
                gradient = drift + 0.1 * noise[number_of][step]
                sent[number_of].append(hook(f"layer{number_of}", gradient.clone()).clone())
        return {"line": the_bug(), "sent": [torch.stack(steps) for steps in sent]}

    def judge_line(evidence, drifts, noise):
        """Line 6 picks the largest, but not by magnitude."""
        check_line(evidence["line"], 6, LINES)

    def judge_sent(evidence, drifts, noise):
        """After 40 steps nearly all of every gradient has been sent, of either sign, a quarter a step."""
        for number_of, drift in enumerate(drifts):
            about, steps = f"parameter {number_of}", evidence["sent"][number_of]
            counts = (steps != 0).sum(1)
            require(
                bool((counts <= 6).all()), f"{about}: {int(counts.max())} values sent in a step; 6 of 24 are a quarter"
            )
            owed = sum(drift + 0.1 * one for one in noise[number_of])
            arrived = steps.sum(0)
            more = (arrived.abs() > 1.5 * owed.abs() + 4).nonzero().flatten().tolist()
            require(
                not more, f"{about}: at place {more[:1]} more was sent than there was: what was sent must not be kept"
            )
            never = ((arrived == 0) & (owed.abs() > 4)).nonzero().flatten().tolist()
            signs = "negative ones" if all(owed[i] < 0 for i in never) else "some"
            require(
                not never,
                f"{about}: {len(never)} of 24 places were never sent in 40 steps, {signs}, however much is owed",
            )
            late = (owed - arrived).abs().max().item() / max(1.0, drift.abs().max().item())
            require(
                late < 12,
                f"{about}: some place is {late:.0f} steps behind after 40: is what was not sent kept and added?",
            )

    parts = {"the line": (1, judge_line), "mended": (1, judge_sent)}


def first_step(losses, target):
    """The first step, counted from 1, after which the loss has reached the target."""
    return next((step for step, loss in enumerate(losses, 1) if loss <= target), None)


def seconds_to(way, target, compute_s, bits):
    """Seconds until a way has reached the target; infinity if never."""
    steps = first_step(way["losses"], target)
    return float("inf") if steps is None else steps * (compute_s + 8 * way["bytes"] / bits)


@task("14.4", ("winner", "break_even"))
class Winner:
    """Loss against time: who is first on a link, and from which link on the plain way wins."""

    def draw(random, hidden):
        """Three ways with their losses by step and bytes a step, a target, and links slow and fast."""
        ways = {}
        for name, rate, nbytes in (("every step", 0.09, 4e6), ("local SGD", 0.07, 5e5), ("top 1 %", 0.05, 8e4)):
            rate *= random.uniform(0.95, 1.05)
            losses = [2 + 3 * 2.718 ** (-rate * step) + 0.01 * (step % 3) for step in range(1, 61)]
            ways[name] = {"losses": losses, "bytes": int(nbytes * random.uniform(0.9, 1.1))}
        ways["far too coarse"] = {"losses": [5 - 0.02 * step for step in range(1, 61)], "bytes": 1000}
        links = [1e6, 2e7, 1e8, 1e9, 1e11, *([5e6, 5e8] if hidden else [])]
        return {"ways": ways, "target": 2.6, "compute_s": random.uniform(0.02, 0.05), "links": links}

    def probe(winner, break_even, ways, target, compute_s, links):
        """The winner on each link, and the link at which two ways are level."""
        found = [winner({name: dict(way) for name, way in ways.items()}, target, compute_s, link) for link in links]
        others = [name for name in ways if name not in ("every step", "far too coarse")]
        level = [break_even(dict(ways["every step"]), dict(ways[name]), target, compute_s) for name in others]
        return {"winners": found, "level": level}

    def judge_winner(evidence, ways, target, compute_s, links):
        """The way that reaches the target first on each link."""
        for link, found in zip(links, evidence["winners"], strict=True):
            times = {name: seconds_to(way, target, compute_s, link) for name, way in ways.items()}
            best, about = min(times, key=times.get), f"on {link / 1e6:g} Mbit/s"
            require(
                isinstance(found, str) and found in ways, f"{about}: {str(found)[:40]!r} is none of {', '.join(ways)}"
            )
            require(times[found] < float("inf"), f'{about}: "{found}" never reaches a loss of {target:g}')
            said = (
                f'"{found}" needs {times[found]:.3g} s to a loss of {target:g}; another one needs {times[best]:.3g} s'
            )
            require(
                times[found] <= times[best] * 1.000001, f"{about}: {said}: compare by time, not by steps or bytes alone"
            )

    def judge_level(evidence, ways, target, compute_s, links):
        """The bits a second at which two ways reach the target after equally long."""
        plain, others = (
            ways["every step"],
            [ways[name] for name in ways if name not in ("every step", "far too coarse")],
        )
        n = first_step(plain["losses"], target)

        def each(formula):
            return [formula(first_step(way["losses"], target), way["bytes"]) for way in others]

        expected = each(lambda m, b: 8 * (n * plain["bytes"] - m * b) / (compute_s * (m - n)))
        faults = {
            "a byte has eight bits": [one / 8 for one in expected],
            "each way needs its own number of steps": each(
                lambda m, b: 8 * n * (plain["bytes"] - b) / (compute_s * (m - n))
            ),
            "that is bytes times seconds: turn it over": [1 / one for one in expected],
        }
        for one in evidence["level"]:
            number(one, float, "the break-even link")
        compare_numbers(evidence["level"], [float(x) for x in expected], ["every step and a way that sends less"] * 2, faults,
                        "bit/s")  # fmt: skip

    parts = {"winner": (1, judge_winner), "break-even": (1, judge_level)}
