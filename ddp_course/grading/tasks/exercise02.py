"""Exercise 2: scatter, reduce, and what passes through the master."""

import torch
from torch import nn

from . import Wrong, require, task
from .diagnose import check_tensor, kind_of, number, same, tensors


@task("2.1", "scatter", forbidden=("ddp_course.stage2_dataparallel.scatter",))
class Scatter:
    """Cut a batch into shards, as equal as can be."""

    def draw(random, hidden):
        """Batches that do and do not divide by the number of devices, one of them smaller than it."""
        sizes = [(8, 2), (10, 4), (7, 3), (3, 4), (5, 1), (random.randrange(9, 30), 8 if hidden else 5)]
        return {"cases": [(tensors(random, 1, rows, 3)[0], devices) for rows, devices in sizes]}

    def probe(scatter, cases):
        """The shards of every batch."""
        return [scatter(tensor, ["cpu"] * devices) for tensor, devices in cases]

    def judge_even(evidence, cases):
        """Batches that divide: nothing lost, nothing twice, in order."""
        check_shards(evidence, cases, even=True)

    def judge_uneven(evidence, cases):
        """Batches that do not: the longer shards first, no empty ones."""
        check_shards(evidence, cases, even=False)

    parts = {"uneven sizes": (1, judge_uneven), "even sizes": (1, judge_even)}


def check_shards(evidence, cases, even):
    """The shards of those batches that do (or do not) divide by the number of devices."""
    for (tensor, devices), found in zip(cases, evidence, strict=True):
        if even == (len(tensor) % devices == 0):
            about = f"{len(tensor)} samples on {devices} devices"
            require(isinstance(found, list | tuple), f"{about}: a list of shards was expected, not {kind_of(found)}")
            expected = [shard for shard in tensor.tensor_split(devices) if len(shard)]
            for index, shard in enumerate(found):
                require(isinstance(shard, torch.Tensor), f"{about}: shard {index} is {kind_of(shard)}")
                require(
                    shard.shape[1:] == tensor.shape[1:],
                    f"{about}: shard {index} is cut along the wrong dimension: samples are dimension 0",
                )
            lengths, wanted = [len(shard) for shard in found], [len(shard) for shard in expected]
            got = f"{about}: shards of {lengths}; {wanted} was expected"
            require(0 not in lengths, f"{got}: a device without samples gets no shard")
            require(sum(lengths) >= len(tensor), f"{got}: samples are lost")
            require(sum(lengths) <= len(tensor), f"{got}: each device gets its own samples, not all of them")
            require(len(found) <= devices, f"{got}: more shards than devices")
            require(lengths == wanted or sorted(lengths) != sorted(wanted), f"{got}: the longer shards come first")
            require(lengths == wanted, f"{got}: sizes differ by one at most")
            if not same(torch.cat(list(found)), tensor):
                raise Wrong(f"{about}: the samples are not in their order: device 0 gets the first ones")


def replicas_of(seed, count, frozen):
    """A model and its copies, each with gradients of its own; the last layer has none on some."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double() for _ in range(count)]
        for index, model in enumerate(models):
            for name, parameter in model.named_parameters():
                if not (frozen and name.startswith("1") and index != count - 1):
                    parameter.grad = torch.randn_like(parameter)
    return models


def gradients(model):
    """All gradients as a list, None where there is none."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@task("2.2", "reduce", forbidden=("ddp_course.stage2_dataparallel.reduce",))
class Reduce:
    """Add the replicas' gradients to the master's."""

    def draw(random, hidden):
        """A seed, and numbers of replicas: up to 3, or 5 if `hidden`."""
        return {"seed": random.randrange(10**6), "counts": [3, 2, 1, *([5] if hidden else [])]}

    def probe(reduce, seed, counts):
        """All replicas' gradients after the call, with and without missing ones."""
        evidence = []
        for count in counts:
            for frozen in (False, True):
                models = replicas_of(seed, count, frozen)
                reduce(models[0], models)
                evidence.append([gradients(model) for model in models])
        return evidence

    def judge_sums(evidence, seed, counts):
        """The master has the sum where every replica has a gradient."""
        check_reduced(evidence, seed, counts, missing=False)

    def judge_missing(evidence, seed, counts):
        """The master has the sum where only the last replica has a gradient."""
        check_reduced(evidence, seed, counts, missing=True)

    def judge_replicas(evidence, seed, counts):
        """The replicas' own gradients are as they were."""
        cases = [(count, frozen) for count in counts for frozen in (False, True)]
        for (count, frozen), found in zip(cases, evidence, strict=True):
            before = [gradients(model) for model in replicas_of(seed, count, frozen)]
            about = f"{count} replicas" + (
                ", of which only the last has a gradient in the last layer" if frozen else ""
            )
            pairs = zip(found[0], before[0], strict=True)
            added = any(now is not None and (then is None or not same(now, then)) for now, then in pairs)
            require(added or count == 1, f"{about}: nothing was added to the master's gradients")
            for rank in range(1, count):
                for now, then in zip(found[rank], before[rank], strict=True):
                    kept = now is None if then is None else now is not None and same(now, then)
                    require(
                        kept,
                        f"{about}: the gradients of replica {rank} have changed: did the master take over its tensor (aliasing)? Copy it",
                    )

    parts = {
        "sums": (1, judge_sums),
        "missing gradients": (1, judge_missing),
        "replicas kept": (1, judge_replicas),
    }


def check_reduced(evidence, seed, counts, missing):
    """The master's gradients, where some replicas have none in the last layer (`missing`), or all have all."""
    cases = [(count, frozen) for count in counts for frozen in (False, True)]
    for (count, frozen), found in zip(cases, evidence, strict=True):
        if frozen != missing:
            continue
        before = [gradients(model) for model in replicas_of(seed, count, frozen)]
        about = f"{count} replicas" + (", of which only the last has a gradient in the last layer" if frozen else "")
        for index, master in enumerate(found[0]):
            parts = [of[index] for of in before if of[index] is not None]
            total = sum(parts)
            if master is None:
                raise Wrong(f"{about}: the master's parameter {index} has no gradient")
            check_tensor(master, total, f"{about}: parameter {index}")
            judge_sum(about, index, master, parts, total, before[0][index])


def judge_sum(about, index, master, parts, total, own):
    """One gradient of the master against the sum."""
    where = f"{about}: parameter {index}"
    if same(master, total, 1e-12):
        return
    mean = total / len(parts)
    require(
        not same(master, mean, 1e-12),
        f"{where} has the mean: the loss was taken over the whole batch, so the sum is right",
    )
    require(own is None or not same(master, own), f"{where} has the master's own gradient only: nothing was added")
    require(
        own is None or not same(master, total + own, 1e-12),
        f"{where} counts the master twice: replicas[0] is the module itself",
    )
    require(
        own is None or not same(master, total - own, 1e-12),
        f"{where} lost the master's own gradient: add to it, do not replace it",
    )
    require(not same(master, parts[-1]), f"{where} has the last replica's gradient only: add, do not replace")
    some = [count for count in range(1, len(parts)) if same(master, sum(parts[:count]), 1e-12)]
    require(not some, f"{where} has the sum of {(some or [0])[0]} of {len(parts)} replicas: all of them count")
    raise Wrong(f"{where} is not the sum of the replicas' gradients")


@task("2.3", "master_sends")
class MasterSends:
    """Bytes that leave the master in one step."""

    def draw(random, hidden):
        """Bytes of parameters, inputs and outputs, on 1 to 8 devices."""
        sizes = [
            (random.randrange(10**5, 10**8), 840 * random.randrange(10, 9999), 840 * random.randrange(1, 99))
            for _ in range(4)
        ]
        return {"cases": [(*of, k) for of, k in zip(sizes, (2, 4, 8, 1), strict=True)]}

    def probe(master_sends, cases):
        """The answer in each case: for all, without the batch, and without the model."""
        return [
            [master_sends(p, inputs, outputs, k), master_sends(p, 0, 0, k), master_sends(0, inputs, outputs, k)]
            for p, inputs, outputs, k in cases
        ]

    def judge_model(evidence, cases):
        """K-1 models leave the master."""
        for (parameters, *_, devices), (whole, model, batch) in zip(cases, evidence, strict=True):
            for one in (whole, model, batch):
                number(one, float, "the result")
            expected = (devices - 1) * parameters
            if not (abs(model - expected) < 0.5 and abs(whole - batch - expected) < 0.5):
                raise Wrong(wrongly_sent(cases, evidence))

    def judge_batch(evidence, cases):
        """The shards of the inputs and of the outputs' gradients leave the master."""
        for (_, inputs, outputs, devices), (whole, model, batch) in zip(cases, evidence, strict=True):
            for one in (whole, model, batch):
                number(one, float, "the result")
            expected = (devices - 1) / devices * (inputs + outputs)
            if not (abs(batch - expected) < 0.5 and abs(whole - model - expected) < 0.5):
                raise Wrong(wrongly_sent(cases, evidence))

    parts = {"the model": (1, judge_model), "the batch": (1, judge_batch)}


def wrongly_sent(cases, evidence):
    """What is wrong with the first bytes that are."""
    for (parameters, inputs, outputs, devices), (found, *_) in zip(cases, evidence, strict=True):
        others, share = devices - 1, (devices - 1) / devices
        model, scattered = others * parameters, share * (inputs + outputs)
        what = f"{devices} devices, p={parameters}, inputs={inputs}, outputs={outputs}: {found:.0f} bytes"
        faults = {
            "the master is a device too: it sends to K-1 others": devices * parameters + inputs + outputs,
            "where is the gradient of the outputs, which the backward pass scatters?": model + share * inputs,
            "the whole model goes to each of the others, in every step": parameters + scattered,
            "the master keeps its own shard: (K-1)/K of the batch travels": model + inputs + outputs,
            "where is the batch?": model,
            "where is the model, which is copied in every step?": scattered,
            "each other device gets one shard, not the whole batch": model + others * (inputs + outputs),
            "gradients come back to the master: that is received, not sent": 2 * model + scattered,
        }
        expected = model + scattered
        for message, wrong in faults.items():
            if abs(found - wrong) <= 0.5 and abs(wrong - expected) >= 1:
                return f"{what}; {message}"
        if not abs(found - expected) < 0.5:
            return f"{what}; {expected:.0f} were expected"
    return "without a batch, or without a model, it is another number than with both"
