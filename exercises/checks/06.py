"""Exercise 6: what a real DDP needs: no_sync, unused parameters, buffers, and a hook that compresses.

6.5 and 6.6 are judged by hand: any share, any order, and any set of words in which the mistakes are will do.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.grading.attempt import COLLECTIVES, RING, SERVER, tensors, worlds
from ddp_course.grading.checks import load_tasks, require, task
from ddp_course.grading.diagnosis import kind_of, same
from ddp_course.running import wire
from ddp_course.stage4_ring import ring_all_reduce
from ddp_course.stage6_ddp import DistributedDataParallel

ONE = load_tasks(1)  # its little net
SYNCHRONISE = "do all ranks synchronise in the same micro-batch?"


@task("6.1", "accumulate", {"bytes": 1, "weights": 2}, ranks=4, bound=1e-9, hang=SYNCHRONISE)
class AccumulateUnsynchronised:
    """Several micro-batches, one synchronisation, and the weights of one step on all samples of all ranks."""

    def draw(random, hidden):
        """A seed for the net, and three or four micro-batches for each rank."""
        count = random.randrange(3, 5)
        return {"seed": random.randrange(10**6), "batches": [ONE.batches_of(random, count, 4) for _ in range(4)]}

    def probe(accumulate, seed, batches):
        """Every rank's weights after one call, how often it called the wrapper, and the bytes that it sent.

        Before it a backward pass was synchronised, so that DDP has told all that it ever tells of itself.
        """
        evidence, mine = {"bytes": {}, "weights": {}}, batches[dist.get_rank()]
        for size, group in worlds(2, 4):
            model, optimizer = ONE.small_model(seed)
            parallel = DistributedDataParallel(model, process_group=group, all_reduce=ring_all_reduce)
            nn.functional.cross_entropy(parallel(mine[0][0]), mine[0][1]).backward()
            parallel.bucket_layout()  # else the next forward pass would tell of it
            called = []
            parallel.register_forward_pre_hook(lambda *_, called=called: called.append(1))
            with wire.counting() as traffic:
                accumulate(parallel, optimizer, mine)
            about = f"with {size} ranks"
            evidence["bytes"][f"{about}, micro-batches that go through the wrapper"] = len(called)
            evidence["bytes"][f"{about}, bytes sent"] = traffic.bytes_sent
            evidence["weights"][f"{about}, the weights after one step"] = ONE.weights(parallel.module)
        return evidence

    def together(ranks, seed, batches):
        """Bytes as the number of synchronisations that they are: 2 (K-1) p in all, each."""
        made, p = {"bytes": {}, "weights": {}}, ONE.weights(ONE.small_model(seed)[0]).nbytes
        for size in (2, 4):
            about, of = f"with {size} ranks", ranks[:size]
            called = f"{about}, micro-batches that go through the wrapper"
            made["bytes"][called] = {rank: one["bytes"][called] for rank, one in enumerate(of)}
            sent = sum(one["bytes"][f"{about}, bytes sent"] for one in of)
            made["bytes"][f"{about}, synchronisations for {len(batches[0])} micro-batches"] = sent / (
                2 * (size - 1) * p
            )
            weights = f"{about}, the weights after one step"
            made["weights"][weights] = {rank: one["weights"][weights] for rank, one in enumerate(of)}
        return made


@task("6.2", "used_anywhere", {"union": 1, "one all-reduce": 1}, ranks=4)
class UsedAnywhere:
    """Which parameters were used on some rank: bools, by one all-reduce, and the input unchanged."""

    def draw(random, hidden):
        """Which parameters each rank used: fixed patterns and random ones, 300 more of these if `hidden`."""
        columns = [(0, 0, 0, 0), (1, 1, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1), (0, 1, 1, 0), (0, 1, 0, 0)]
        columns += [tuple(random.randrange(2) for _ in range(4)) for _ in range(5 + 300 * hidden)]
        return {"used": [torch.tensor([column[rank] for column in columns], dtype=torch.bool) for rank in range(4)]}

    def probe(used_anywhere, used):
        """Every rank's result, its input afterwards, and the all-reduces that it called."""
        evidence = {"union": {}, "one all-reduce": {}}
        for size, group in worlds(4, 3, 2):
            mine, calls = used[dist.get_rank()].clone(), []

            def all_reduce(tensor, group=group, calls=calls):
                calls.append(tensor.dtype == torch.bool)
                return ring_all_reduce(tensor, group)

            result = used_anywhere(mine, all_reduce)
            about = f"with {size} ranks"
            evidence["union"][f"{about}, bools are added up"] = any(calls)
            evidence["union"][about] = result
            evidence["one all-reduce"][f"{about}, the input is as it was"] = mine.equal(used[dist.get_rank()])
            evidence["one all-reduce"][f"{about}, all-reduces"] = len(calls)
        return evidence


def buffered(seed, rank):
    """A model with buffers of several dtypes, different on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        model.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    for index, buffer in enumerate(model.buffers()):
        buffer.add_(10 * (rank + 1) + index)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    return model


@task("6.3", "share_buffers", {"buffers": 1, "bytes": 1}, ranks=4, forbidden=SERVER + RING + COLLECTIVES)
class ShareBuffers:
    """Every rank gets rank src's buffers, in place; parameters stay, and (K-1) times the bytes leave the source."""

    def draw(random, hidden):
        """A seed for the model, and a source for each world size."""
        return {"seed": random.randrange(10**6), "sources": {3: 2, 4: random.randrange(1, 4), 2: 0, 1: 0}}

    def probe(share_buffers, seed, sources):
        """Every rank's buffers and weights afterwards, whether tensors were replaced, and what it sent."""
        evidence = {"buffers": {}, "bytes": {}}
        for size, group in worlds(3, 4, 2, 1):
            model, src = buffered(seed, dist.get_rank()), sources[size]
            places = [buffer.data_ptr() for buffer in model.buffers()]
            with wire.counting() as traffic:
                share_buffers(model, src, group)
            about, found = f"with {size} ranks, source {src}", evidence["buffers"]
            for index, buffer in enumerate(model.buffers()):
                found[f"{about}, buffer {index} ({str(buffer.dtype).removeprefix('torch.')})"] = buffer
            found[f"{about}, the parameters"] = ONE.weights(model)
            found[f"{about}, buffers are the tensors that they were"] = places == [
                b.data_ptr() for b in model.buffers()
            ]
            evidence["bytes"][f"{about}, bytes sent"] = traffic.bytes_sent
        return evidence


@task("6.4", "compressed_average", {"sent in half": 1, "mean": 1}, ranks=4, bound=4e-3)
class CompressedAverage:
    """A communication hook that sends half the bytes: reduced once, in float16, and the mean in float32."""

    def draw(random, hidden):
        """Gradients of which some are as large as 60,000, near the end of float16."""
        values = [tensor * 100 for tensor in tensors(random, 4, 40)]
        for tensor in values:
            tensor[:6] = torch.tensor([random.uniform(40_000, 64_000) for _ in range(6)])
        return {"values": values}

    def probe(compressed_average, values):
        """Every rank's result, and the dtypes that were reduced."""
        evidence = {"sent in half": {}, "mean": {}}
        for size, group in worlds(3, 4, 2):
            flat, dtypes = values[dist.get_rank()].clone(), []

            def all_reduce(tensor, group=group, dtypes=dtypes):
                dtypes.append(str(tensor.dtype).removeprefix("torch."))
                return ring_all_reduce(tensor, group)

            result = compressed_average(flat, all_reduce, size)
            evidence["sent in half"][f"with {size} ranks, all_reduce was called with"] = dtypes
            evidence["mean"][f"with {size} ranks, the mean"] = result
        return evidence


@task(
    "6.5",
    "main",
    {"shares": 1, "epochs": 1, "weights": 1, "one writer": 1, "names": 1},
    ranks=4,
    hang="do all ranks take equally many steps?",
    seconds=10,
)
class RealScript:
    """The five usual mistakes of a script, mended."""

    def draw(random, hidden):
        """A seed, and samples that four ranks can share equally (or not, if `hidden`)."""
        count = 32 + 6 * hidden
        inputs = tensors(random, 1, count, 3)[0]
        return {"seed": random.randrange(10**6), "inputs": inputs, "targets": torch.arange(count) % 3}

    def probe(main, seed, inputs, targets):
        """Which samples a rank trained on, in their order, its weights at the end, and what it left in its folder."""
        torch.manual_seed(seed)
        model, asked = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)), []
        model.register_forward_pre_hook(
            lambda _, given: asked.extend(int((inputs == row).all(1).nonzero()[0]) for row in given[0])
        )
        torch.manual_seed(seed + dist.get_rank())  # ranks shuffle differently, as processes do
        before = ONE.weights(model)
        with tempfile.TemporaryDirectory() as folder:
            main(folder, nn.parallel.DistributedDataParallel, model, torch.utils.data.TensorDataset(inputs, targets), 2)
            files = sorted(os.listdir(folder))
            state = torch.load(os.path.join(folder, files[0])) if files else None
        state = state if isinstance(state, dict) else {}
        names = [str(name) for name in state.get("model", ())]
        after = ONE.weights(model)
        run = {
            "asked": asked,
            "before": before,
            "weights": after,
            "files": files,
            "names": names,
            "keys": [*map(str, state)],
        }
        return {"run": {"all": run}}

    def judge_shares(evidence, seed, inputs, targets):
        """Each rank sees a share of its own, and all together see everything."""
        evidence = list(evidence["run"]["all"].values())
        require(all(rank["asked"] for rank in evidence), "a rank saw no samples at all: take them from `data`")
        first = [set(rank["asked"][: len(rank["asked"]) // 2]) for rank in evidence]
        seen, share = set().union(*first), -(-len(inputs) // 4)
        alone = f"the ranks train on the same samples ({len(first[0])} of {len(inputs)} on rank 0): each needs a share of its own"
        require(max(map(len, first)) <= share, alone)
        require(len(seen) == len(inputs), f"in an epoch only {len(seen)} of {len(inputs)} samples are seen by anybody")

    def judge_epochs(evidence, seed, inputs, targets):
        """The second epoch has another order than the first, and shares that are as disjoint."""
        evidence = list(evidence["run"]["all"].values())
        for rank, one in enumerate(evidence):
            half = len(one["asked"]) // 2
            again = one["asked"][:half] == one["asked"][half:]
            require(
                not again or not half,
                f"rank {rank} sees the same order in both epochs: the sampler must be told the epoch",
            )
            sizes = half == -(-len(inputs) // 4)
            require(
                sizes,
                f"rank {rank} sees {half} samples an epoch: an order of its own for each epoch begins with a share",
            )

    def judge_weights(evidence, seed, inputs, targets):
        """The replicas have trained, and are equal at the end."""
        evidence = list(evidence["run"]["all"].values())
        moved = not same(evidence[0]["weights"], evidence[0]["before"])
        require(moved, "the weights have not changed: is there a backward pass and a step?")
        equal = all(same(rank["weights"], evidence[0]["weights"], 1e-6) for rank in evidence)
        require(
            equal,
            "the ranks' weights differ at the end: gradients are averaged only for a loss that the wrapper computed",
        )

    def judge_writer(evidence, seed, inputs, targets):
        """Rank 0 alone writes the checkpoint."""
        evidence = list(evidence["run"]["all"].values())
        writers = [rank for rank, one in enumerate(evidence) if one["files"]]
        require(writers, "nobody wrote a checkpoint")
        require(len(writers) == 1, f"ranks {writers} all write the checkpoint: they would write over each other's file")
        require(writers == [0], f"rank {writers[0]} writes the checkpoint; by custom it is rank 0")
        require(
            evidence[0]["files"] == ["checkpoint.pt"], f"the files are {evidence[0]['files']}, not ['checkpoint.pt']"
        )

    def judge_names(evidence, seed, inputs, targets):
        """The checkpoint has the model's own names."""
        evidence = list(evidence["run"]["all"].values())
        names = [name for rank in evidence for name in rank["names"]]
        require(names, 'the checkpoint has no "model" with named tensors')
        require(
            any("epoch" in rank["keys"] for rank in evidence),
            'the checkpoint has no "epoch": nobody could go on from it',
        )
        wrapped = [name for name in names if name.startswith("module.")]
        require(
            not wrapped,
            f"the checkpoint calls a tensor \"{''.join(wrapped[:1])}\": these are the wrapper's names, not the model's",
        )
        require(
            set(names) == {"0.weight", "0.bias", "2.weight", "2.bias"}, f"the checkpoint holds {sorted(set(names))[:6]}"
        )

    judges = {
        "shares": judge_shares,
        "epochs": judge_epochs,
        "weights": judge_weights,
        "one writer": judge_writer,
        "names": judge_names,
    }


USUAL = ("sampler", "epoch", "wrapper", "writers", "names")


def symptoms(random, wrong, size):
    """What is known after a run with these mistakes: samples, weights, saved."""
    count = size * 7 - 1
    orders = [random.sample(range(count), count) for _ in range(2)]
    orders = [orders[0], orders[0]] if "epoch" in wrong else orders
    samples = []
    for rank in range(size):
        mine = [list(order) if "sampler" in wrong else (order + order[:1])[rank::size] for order in orders]
        samples.append(mine)
    total = random.uniform(-3, 3)
    weights_of = [total + (0.01 * rank if "wrapper" in wrong else 0) for rank in range(size)]
    names = [("module." if "names" in wrong else "") + name for name in ("0.weight", "0.bias", "submodule.weight")]
    saved = [names if rank == 0 or "writers" in wrong else [] for rank in range(size)]
    return samples, weights_of, saved


@task("6.6", "mistakes", {"samples": 1, "weights and files": 1})
class FromSymptoms:
    """Which of the five mistakes were made, from what a run leaves."""

    def draw(random, hidden):
        """Runs without a mistake, with one each, and with several; more ranks if `hidden`."""
        chosen = [set(), *({one} for one in USUAL), set(USUAL), {"sampler", "epoch"}]
        chosen += [set(random.sample(USUAL, random.randrange(2, 5))) for _ in range(3)]
        random.shuffle(chosen)
        return {
            "runs": [
                (symptoms(random, wrong, random.choice((2, 3, 4 + 4 * hidden))), sorted(wrong)) for wrong in chosen
            ]
        }

    def probe(mistakes, runs):
        """The mistakes named for each run."""
        found = [mistakes(*seen) for seen, _ in runs]
        told = [sorted(map(str, one)) if isinstance(one, set | frozenset | list | tuple) else one for one in found]
        return {"run": {"all": told}}

    def judge_named(evidence, runs, which=USUAL):
        """Every mistake by its word, and no other."""
        for found, (seen, wrong) in zip(evidence["run"]["all"], runs, strict=True):
            require(isinstance(found, list), f"a set of words was expected, not {kind_of(found)}")
            strange = sorted(set(found) - set(USUAL))
            require(not strange, f"{strange[:1]} is none of {', '.join(USUAL)}")
            about = f"{len(seen[0])} ranks"
            missed, more = (
                sorted((a - b) & set(which)) for a, b in ((set(wrong), set(found)), (set(found), set(wrong)))
            )
            look = {
                "sampler": "rank 0 and rank 1 saw the same samples",
                "epoch": "the first and the second epoch have the same order",
                "wrapper": "the weights differ from rank to rank",
                "writers": "more than one rank wrote a checkpoint",
                "names": 'names begin with "module."',
            }
            require(
                not missed,
                f'{about}: "{missed[0] if missed else ""}" is missing: {look.get(missed[0] if missed else "", "")}',
            )
            require(not more, f'{about}: "{more[0] if more else ""}" is named, but {SO[more[0]] if more else ""}')

    def judge_data(evidence, runs):
        """Mistakes with the samples."""
        FromSymptoms.judge_named(evidence, runs, ("sampler", "epoch"))

    def judge_model(evidence, runs):
        """Mistakes with the model and its checkpoint."""
        FromSymptoms.judge_named(evidence, runs, ("wrapper", "writers", "names"))

    judges = {"samples": judge_data, "weights and files": judge_model}


SO = {
    "sampler": "the ranks' samples differ, but for one or two that fill up the last round",
    "epoch": "the two epochs have different orders",
    "wrapper": "all weights are equal",
    "writers": "only one rank wrote",
    "names": 'no name begins with "module."; it may stand inside of one',
}
