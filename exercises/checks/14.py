"""Exercise 14: send the largest, meet less often, find the hook that loses gradients, bet on a
winner, and send eight bits.
"""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_course.checking.checks import task

from .shared import noted_ring, require, several, tensors, worlds


@task("14.1", "compress", {"largest": 1, "feedback": 2}, bound=1e-5)
class Compress:
    """The largest values by magnitude and their places; what is not sent is added to the next
    gradient.
    """

    def draw(random):
        cases = [
            (tensors(random, 5, 40), 0.1),
            (tensors(random, 5, 25), 0.2),
            (tensors(random, 5, 19), 0.14),
        ]
        return {"cases": [*cases, (tensors(random, 5, 9), 0.01)]}

    def probe(compress, cases):
        for gradients, share in cases:
            left = torch.zeros(len(gradients[0]))
            size = len(gradients[0])
            for step, gradient in enumerate(gradients, 1):
                given = gradient.clone()
                about = f"{size} values, share {share:g}, step {step}"
                answer = compress(given, left, share)
                values, places, left = several(answer, 3, f"{about}: return (values, places, left)")
                part = "largest" if step == 1 else "feedback"
                sent = torch.zeros(size)
                yield part, f"{about}, how many values; max(1, round(share * n)) are", len(values)
                yield (
                    part,
                    f"{about}, what was sent",
                    sent.index_add(0, torch.as_tensor(places).long(), values),
                )
                yield "feedback", f"{about}, what is left", left
                yield "feedback", f"{about}, the gradient afterwards", given


@task("14.2", "meet", {"local SGD": 1, "outer step": 1}, ranks=4, bound=1e-5)
class Meet:
    """Local SGD's meeting, with DiLoCo's outer step: the mean change is a gradient, and the
    velocity comes back too.
    """

    def draw(random):
        settings = [(1.0, 0.0), (0.7, 0.0), (0.5, 0.9)]
        more = [(round(random.uniform(0.1, 2), 2), round(random.uniform(0.1, 0.9), 2))]
        shared, velocity = tensors(random, 2, 30)
        own = tensors(random, 4, 30)
        return {"shared": shared, "own": own, "velocity": velocity, "settings": settings + more}

    def probe(meet, shared, own, velocity, settings):
        for size, group in worlds(2, 3):
            for index, (rate, momentum) in enumerate(settings):
                about = f"with {size} ranks, rate {rate:g}, momentum {momentum:g}"
                all_reduce, calls = noted_ring(group)
                mine = own[dist.get_rank()].clone()
                answer = meet(
                    shared.clone(), mine, velocity.clone(), all_reduce, size, rate, momentum
                )
                weights, new_velocity = several(
                    answer, 2, f"{about}: return a pair: (weights, velocity)"
                )
                part = "outer step" if index else "local SGD"
                yield part, f"{about}, all-reduces", len(calls)
                yield part, f"{about}, the weights", weights
                yield part, f"{about}, the velocity", new_velocity


@task("14.3", ("the_bug", "make_hook"), {"the line": 1, "mended": 1})
class FindTheLossyHook:
    """A hook that never sends what is large and negative: line 6 picks the largest, but not by
    magnitude.
    """

    def draw(random):
        drifts = [tensors(random, 1, 24)[0] for _ in range(2)]
        return {"drifts": drifts, "noise": [tensors(random, 40, 24) for _ in range(2)]}

    def probe(the_bug, make_hook, drifts, noise):
        hook = make_hook(0.25)
        sent = [[], []]
        for step in range(40):
            for number, drift in enumerate(drifts):
                sent[number].append(
                    hook(f"layer{number}", drift + 0.1 * noise[number][step]).clone()
                )
        yield "the line", "the faulty line", the_bug()
        for number, drift in enumerate(drifts):
            owed = sum(drift + 0.1 * each for each in noise[number])
            yield from kept_promises(f"parameter {number}", torch.stack(sent[number]), owed, drift)


def kept_promises(about, steps, owed, drift):
    """What a hook must send: at most a quarter per step, no more than there was, either sign, in
    the end nearly all.
    """
    arrived = steps.sum(0)
    most = int((steps != 0).sum(1).max())
    never = (arrived == 0) & (owed.abs() > 4)
    more = int((arrived.abs() > 1.5 * owed.abs() + 4).sum())
    late = (owed - arrived).abs().max().item() / max(1.0, drift.abs().max().item())
    for sign, places in (("negative", owed < 0), ("positive", owed > 0)):
        silent = f"{about}, {sign} places that were never sent, however much is owed"
        yield "mended", silent, int((never & places).sum())
    yield "mended", f"{about}, values sent in a step, when 6 of 24 are a quarter", max(6, most)
    yield "mended", f"{about}, places at which more was sent than there was", more
    behind = f"{about}, steps that some place is behind after 40, if more than 12"
    steps_behind = round(late) if late >= 12 else 0
    yield "mended", behind, steps_behind


@task("14.4", ("winner", "break_even"), {"winner": 1, "break-even": 1})
class Winner:
    """Loss against time: who is first on a link, and from which link on the plain way wins."""

    def draw(random):
        ways = {}
        for name, rate, nbytes in (
            ("every step", 0.09, 4e6),
            ("local SGD", 0.07, 5e5),
            ("top 1 %", 0.05, 8e4),
        ):
            rate *= random.uniform(0.95, 1.05)
            losses = [2 + 3 * 2.718 ** (-rate * step) + 0.01 * (step % 3) for step in range(1, 61)]
            ways[name] = {"losses": losses, "bytes": int(nbytes * random.uniform(0.9, 1.1))}
        ways["far too coarse"] = {
            "losses": [5 - 0.02 * step for step in range(1, 61)],
            "bytes": 1000,
        }
        links = [1e6, 2e7, 1e8, 1e9, 1e11, 5e6, 5e8]
        return {
            "ways": ways,
            "target": 2.6,
            "compute_s": random.uniform(0.02, 0.05),
            "links": links,
        }

    def probe(winner, break_even, ways, target, compute_s, links):
        for link in links:
            about = (
                f"on {link / 1e6:g} Mbit/s, by the time to a loss of {target:g}, not by steps or"
                " bytes alone"
            )
            yield (
                "winner",
                about,
                winner({name: dict(way) for name, way in ways.items()}, target, compute_s, link),
            )
        for name in ("local SGD", "top 1 %"):
            level = break_even(dict(ways["every step"]), dict(ways[name]), target, compute_s)
            case = f"every step and {name}, in bit/s"
            rounded = float(f"{level:.6g}") if type(level) in (int, float) else level
            yield "break-even", case, rounded


@task("14.5", "int8_mean", {"mean": 2, "feedback": 1, "bytes": 1}, bound=1e-5)
class Int8Mean:
    """Whole numbers of one byte and a scale per rank; what rounding loses is sent later."""

    def draw(random):
        rounds = [tensors(random, 3, 30) for _ in range(4)]
        for ranks in rounds:  # The ranks' gradients have other sizes.
            ranks[1] *= 20
            ranks[2] *= 0.01
        return {"rounds": rounds, "zeros": [torch.zeros(8) for _ in range(3)]}

    def probe(int8_mean, rounds, zeros):
        left = [torch.zeros(30) for _ in range(3)]
        for number, gradients in enumerate(rounds, start=1):
            about = f"step {number}"
            means, left, sent, changed = on_three(int8_mean, gradients, left, about)
            part = "mean" if number == 1 else "feedback"
            for rank in range(3):
                yield part, f"{about}, the mean on rank {rank}", means[rank]
                yield "feedback", f"{about}, what is left on rank {rank}", left[rank]
            yield "feedback", f"{about}, gradient and left afterwards", changed
            yield "bytes", f"{about}, bytes of what rank 0 gathers", sent
        with Conversions() as conversions:
            means, left, *_ = on_three(int8_mean, zeros, zeros, "all zeros")
        yield "mean", "all zeros, what is rounded", conversions.fault
        yield "mean", "all zeros, the mean on rank 0", means[0]
        yield "feedback", "all zeros, what is left on rank 0", left[0]


class Conversions(TorchDispatchMode):
    """Notices what is no number before it becomes a byte: as a byte it may be 0, or anything."""

    fault = ""

    def __torch_dispatch__(self, function, types, arguments=(), names=None):
        result = function(*arguments, **(names or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.int8:
            for given in arguments:
                if isinstance(given, torch.Tensor) and given.isnan().any():
                    self.fault = (
                        "0 / 0 is not a number, and which byte it becomes differs from processor to"
                        " processor: where the scale is 0, divide by something else"
                    )
        return result


def on_three(int8_mean, gradients, left, about):
    """Play three ranks: the means, what is left, the bytes that rank 0 gives to `gather`, and in
    words whether an answer has changed what it was given.

    A rank's call is repeated until `gather` can give it what the others have at the same place.
    """
    given = [[], [], []]  # what each rank has handed to gather, call by call
    answers = [None, None, None]
    changed = ""
    while any(answer is None for answer in answers):
        before = [len(calls) for calls in given]
        for rank in range(3):
            calls = []

            def gather(tensor, calls=calls, rank=rank):
                require(
                    isinstance(tensor, torch.Tensor),
                    f"{about}: gather takes a tensor, not {tensor!r:.40}: the scale is a tensor of one"
                    " number",
                )
                calls.append(tensor.clone())
                place = len(calls) - 1
                if len(given[rank]) == place:
                    given[rank].append(tensor.clone())
                if any(len(other) <= place for other in given):
                    raise Later
                return [other[place].clone() for other in given]

            arguments = gradients[rank].clone(), left[rank].clone()
            try:
                result = int8_mean(*arguments, gather)
            except Later:
                continue
            for name, now, was in zip(
                ("gradient", "left"), arguments, (gradients[rank], left[rank]), strict=True
            ):
                if not torch.equal(now, was):
                    changed = f"`{name}` was changed: somebody else needs it, so make a new tensor"
            answers[rank] = several(result, 2, f"{about}: return a pair: (mean, left)")
        if before == [len(calls) for calls in given]:
            break
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in given[0])
    return [mean for mean, _ in answers], [rest for _, rest in answers], nbytes, changed


class Later(Exception):
    """A rank has to wait for what another one gathers; not to be caught by an answer."""
