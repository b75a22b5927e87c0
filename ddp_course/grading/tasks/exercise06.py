"""Exercise 6: what a real DDP needs: no_sync, unused parameters, buffers, and a hook that compresses."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from ...running import wire
from ...stage4_ring import ring_all_reduce
from ..probing import traffic_of, worlds
from . import require, task
from .diagnose import compare_ranks, kind_of, same, tensors
from .exercise01 import batches_of, loss_of, small_model, weights
from .forbidden import COLLECTIVES, RING, SERVER

SYNCHRONISE = "do all ranks synchronise in the same micro-batch?"


@task("6.1", "accumulate", ranks=4, private=("batches",), hang=SYNCHRONISE)
class AccumulateUnsynchronised:
    """Several micro-batches, one synchronisation."""

    def draw(random, hidden):
        """A seed for the net, and three or four micro-batches for each rank."""
        count = random.randrange(3, 5)
        return {"seed": random.randrange(10**6), "batches": [batches_of(random, count, 4) for _ in range(4)]}

    def prepare(seed, batches):
        """A model in DDP and its optimizer, in worlds of 2 and 4, after a backward pass that was synchronised.

        With it DDP has told all that it ever tells of itself: the models agree, their weights are shared, and the
        buckets are those that they stay.
        """
        from ...stage6_ddp import DistributedDataParallel

        made = {}
        for size, group in worlds(2, 4):
            model, optimizer = small_model(seed)
            parallel = DistributedDataParallel(model, process_group=group, all_reduce=ring_all_reduce)
            loss_of(parallel, *batches[dist.get_rank()][0]).backward()
            parallel.bucket_layout()  # else the next forward pass would tell of it
            made[size] = parallel, optimizer
        return {"made": made}

    def probe(accumulate, seed, batches, made):
        """Every rank's weights after one call, and the bytes that it sent."""
        evidence = {}
        for size, (parallel, optimizer) in made.items():
            with wire.counting() as traffic:
                accumulate(parallel, optimizer, batches[dist.get_rank()])
            evidence[size] = {"weights": weights(parallel.module), "traffic": traffic_of(traffic)}
        return evidence

    def judge_bytes(evidence, seed, batches):
        """One synchronisation: 2 (K-1) p bytes in all."""
        p = weights(small_model(seed)[0]).nbytes
        for size in (2, 4):
            about, count = f"with {size} ranks", len(batches[0])
            syncs = sum(evidence[rank][size]["traffic"]["bytes"] for rank in range(size)) / (2 * (size - 1) * p)
            require(
                syncs > 0, f"{about}: the gradients were never synchronised: the last micro-batch is outside no_sync"
            )
            advice = "all but the last belong into no_sync, and no_sync must hold the forward pass too"
            many = f"{about}: {syncs:g} synchronisations for {count} micro-batches; one was expected: {advice}"
            require(syncs == 1, many)

    def judge_weights(evidence, seed, batches):
        """The weights of one step on all samples of all ranks."""
        for size in (2, 4):
            about, count = f"with {size} ranks", len(batches[0])
            found = [evidence[rank][size] for rank in range(size)]
            expected = accumulated(seed, batches[:size], 1 / count)
            guesses = [
                (
                    f"the gradients are {count} times too large: divide each loss by the number of micro-batches",
                    [accumulated(seed, batches[:size], 1.0)] * size,
                ),
                ("the weights have not changed: is there a step()?", [weights(small_model(seed)[0])] * size),
                (
                    "only the last micro-batch counts: zero_grad() belongs before the first one",
                    [accumulated(seed, [of[-1:] for of in batches[:size]], 1 / count)] * size,
                ),
                (
                    "old gradients are still in it: zero_grad() belongs before the first micro-batch",
                    [accumulated(seed, batches[:size], 1 / count, stale=True)] * size,
                ),
            ]
            compare_ranks(
                [one["weights"] for one in found], [expected] * size, about, guesses, 1e-9, "one step on all samples"
            )

    parts = {"bytes": (1, judge_bytes), "weights": (2, judge_weights)}


def accumulated(seed, batches, scale, stale=False):
    """Weights after one step on the mean over ranks of `scale` times the sum over micro-batches."""
    model, optimizer = small_model(seed)
    for of_rank in batches:
        for index, batch in enumerate(of_rank):
            loss = loss_of(model, *batch) * scale / len(batches)
            (loss + loss / scale * (stale and index == 0)).backward()
    optimizer.step()
    return weights(model)


@task("6.2", "used_anywhere", ranks=4, private=("used",))
class UsedAnywhere:
    """Which parameters were used on some rank."""

    def draw(random, hidden):
        """Which parameters each rank used: fixed patterns and random ones, 300 more of these if `hidden`."""
        columns = [(0, 0, 0, 0), (1, 1, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1), (0, 1, 1, 0), (0, 1, 0, 0)]
        columns += [tuple(random.randrange(2) for _ in range(4)) for _ in range(5 + 300 * hidden)]
        return {"used": [torch.tensor([column[rank] for column in columns], dtype=torch.bool) for rank in range(4)]}

    def probe(used_anywhere, used):
        """Every rank's result, its input afterwards, and the all-reduces that it called."""
        evidence = {}
        for size, group in worlds(4, 3, 2):
            mine, calls = used[dist.get_rank()].clone(), []

            def all_reduce(tensor, group=group, calls=calls):
                calls.append(str(tensor.dtype))
                return ring_all_reduce(tensor, group)

            result = used_anywhere(mine, all_reduce)
            evidence[size] = {"result": result, "input": mine, "calls": len(calls), "dtype": calls[0] if calls else ""}
        return evidence

    def judge_union(evidence, used):
        """The union of all ranks, as bools."""
        for size in (4, 3, 2):
            about = f"with {size} ranks"
            found = [evidence[rank][size] for rank in range(size)]
            counts = sum(one.long() for one in used[:size])
            require(found[0]["dtype"] != "torch.bool", f"{about}: bools do not add up to a count; use int64")
            results = [one["result"] for one in found]
            kind = isinstance(results[0], torch.Tensor) and results[0].dtype != torch.bool
            require(
                not kind,
                f"{about}: the result has dtype {results[0].dtype if kind else ''}; a tensor of bools was expected",
            )
            guesses = [
                ("that is what this rank used: ask the others", used[:size]),
                ("that is what all ranks used; one that used it is enough", [counts == size] * size),
                ("that is what most ranks used; one that used it is enough", [counts > size / 2] * size),
                ("that is what rank 0 used", [used[0]] * size),
                ("that is what was used nowhere", [counts == 0] * size),
                ("parameters that exactly one rank used are missing: at least one", [counts > 1] * size),
            ]
            compare_ranks(results, [counts > 0] * size, about, guesses, oracle="the union")

    def judge_cost(evidence, used):
        """One all-reduce, and the input unchanged."""
        for size in (4, 3, 2):
            about, found = f"with {size} ranks", [evidence[rank][size] for rank in range(size)]
            for rank, one in enumerate(found):
                require(same(one["input"], used[rank]), f"{about}: the input was changed (aliasing): work on a copy")
                require(one["calls"] == 1, f"{about}: {one['calls']} all-reduces; one for all parameters is enough")

    parts = {"union": (1, judge_union), "one all-reduce": (1, judge_cost)}


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


@task("6.3", "share_buffers", ranks=4, forbidden=SERVER + RING + COLLECTIVES)
class ShareBuffers:
    """Every rank gets rank src's buffers."""

    def draw(random, hidden):
        """A seed for the model, and a source for each world size."""
        return {"seed": random.randrange(10**6), "sources": {3: 2, 4: random.randrange(1, 4), 2: 0, 1: 0}}

    def probe(share_buffers, seed, sources):
        """Every rank's buffers and weights afterwards, whether tensors were replaced, and what it sent."""
        evidence = {}
        for size, group in worlds(3, 4, 2, 1):
            model = buffered(seed, dist.get_rank())
            places = [buffer.data_ptr() for buffer in model.buffers()]
            with wire.counting() as traffic:
                share_buffers(model, sources[size], group)
            evidence[size] = {
                "buffers": list(model.buffers()),
                "weights": weights(model),
                "moved": places != [buffer.data_ptr() for buffer in model.buffers()],
                "traffic": traffic_of(traffic),
            }
        return evidence

    def judge_buffers(evidence, seed, sources):
        """The source's buffers everywhere, in place, parameters unchanged."""
        for size, src in sources.items():
            own = [list(buffered(seed, rank).buffers()) for rank in range(size)]
            for index, buffer in enumerate(own[src]):
                about = f"with {size} ranks, source {src}, buffer {index} ({str(buffer.dtype).removeprefix('torch.')})"
                guesses = [
                    (
                        "it was not shared: all buffers count, of any dtype, and they change in place",
                        [of[index] for of in own],
                    ),
                    ("it is rank 0's; the source is another rank", [own[0][index]] * size),
                    (
                        "it is the mean; the source's own value was expected",
                        [(sum(of[index] for of in own) / size).to(buffer.dtype)] * size,
                    ),
                ]
                found = [evidence[rank][size]["buffers"][index] for rank in range(size)]
                compare_ranks(found, [buffer] * size, about, guesses, oracle="the source")
            for rank in range(size):
                one, about = evidence[rank][size], f"with {size} ranks"
                require(
                    same(one["weights"], weights(buffered(seed, rank))),
                    f"{about}: the parameters have changed; only buffers are shared here",
                )
                require(
                    not one["moved"], f"{about}: buffers were replaced by new tensors; change them in place (copy_)"
                )

    def judge_bytes(evidence, seed, sources):
        """(K-1) times the buffers' bytes leave the source."""
        p = sum(buffer.numel() * buffer.element_size() for buffer in buffered(seed, 0).buffers())
        for size, src in sources.items():
            sent = evidence[src][size]["traffic"]["bytes"]
            require(
                sent == (size - 1) * p,
                f"with {size} ranks: the source sent {sent} bytes; (K-1) times {p} were expected",
            )

    parts = {"buffers": (1, judge_buffers), "bytes": (1, judge_bytes)}


@task("6.4", "compressed_average", ranks=4, private=("values",))
class CompressedAverage:
    """A communication hook that sends half the bytes."""

    def draw(random, hidden):
        """Gradients of which some are as large as 60,000, near the end of float16."""
        values = [tensor * 100 for tensor in tensors(random, 4, 40)]
        for tensor in values:
            tensor[:6] = torch.tensor([random.uniform(40_000, 64_000) for _ in range(6)])
        return {"values": values}

    def probe(compressed_average, values):
        """Every rank's result, and the dtypes that were reduced."""
        evidence = {}
        for size, group in worlds(3, 4, 2):
            flat, dtypes = values[dist.get_rank()].clone(), []

            def all_reduce(tensor, group=group, dtypes=dtypes):
                dtypes.append(str(tensor.dtype))
                return ring_all_reduce(tensor, group)

            result = compressed_average(flat, all_reduce, size)
            evidence[size] = {"result": result, "dtypes": dtypes}
        return evidence

    def judge_dtypes(evidence, values):
        """Reduced once, and in float16."""
        for size in (3, 4, 2):
            about, dtypes = f"with {size} ranks", evidence[0][size]["dtypes"]
            require(dtypes, f"{about}: all_reduce was not called")
            require(dtypes != ["torch.float32"], f"{about}: the gradient travels in float32: nothing is saved")
            require(dtypes != ["torch.bfloat16"], f"{about}: bfloat16 has 8 bits of precision; float16 was asked for")
            require(
                dtypes == ["torch.float16"], f"{about}: reduced as {', '.join(dtypes)}; once, in float16, was expected"
            )

    def judge_mean(evidence, values):
        """The mean in float32, within float16's precision."""
        for size in (3, 4, 2):
            about, total = f"with {size} ranks", sum(values[:size])
            found = [evidence[rank][size]["result"] for rank in range(size)]
            for rank, one in enumerate(found):
                require(
                    isinstance(one, torch.Tensor),
                    f"{about}: rank {rank} returns {kind_of(one)}; return the averaged gradient",
                )
                require(one.dtype == torch.float32, f"{about}: the result is {one.dtype}; turn it back into float32")
                require(
                    bool(one.isfinite().all()),
                    f"{about}: the sum overflows (float16 ends at 65,504): divide by K before you compress",
                )
            guesses = [
                ("you have the sum: is there a division by K?", [total] * size),
                ("it was divided by K twice", [total / size / size] * size),
                ("that is the rank's own gradient: the reduced tensor is the one to return", values[:size]),
                (
                    "that is the rank's own gradient, divided: the reduced tensor is the one to return",
                    [v / size for v in values[:size]],
                ),
            ]
            compare_ranks(found, [total / size] * size, about, guesses, 4e-3, "the mean")

    parts = {"sent in half": (1, judge_dtypes), "mean": (1, judge_mean)}


class Seen(torch.utils.data.Dataset):
    """Samples that note who is asked for."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets, self.asked = inputs, targets, []

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.asked.append(int(index))
        return self.inputs[index], self.targets[index]


@task("6.5", "main", ranks=4, imports=("os", "os.path", "pathlib"), hang="do all ranks take equally many steps?")
class RealScript:
    """The five usual mistakes of a script, mended."""

    def draw(random, hidden):
        """A seed, and samples that four ranks can share equally (or not, if `hidden`)."""
        count = 32 + 6 * hidden
        inputs = tensors(random, 1, count, 3)[0]
        return {"seed": random.randrange(10**6), "inputs": inputs, "targets": torch.arange(count) % 3}

    def probe(main, seed, inputs, targets):
        """Which samples a rank saw by epoch, its weights at the end, and what it left in its folder."""
        torch.manual_seed(seed)
        model, data = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)), Seen(inputs, targets)
        torch.manual_seed(seed + dist.get_rank())  # ranks shuffle differently, as processes do
        before = weights(model)
        with tempfile.TemporaryDirectory() as folder:
            main(folder, nn.parallel.DistributedDataParallel, model, data, 2)
            files = sorted(os.listdir(folder))
            state = torch.load(os.path.join(folder, files[0])) if files else None
        names = [str(name) for name in state["model"]] if isinstance(state, dict) and "model" in state else []
        model.zero_grad()
        return {"asked": data.asked, "before": before, "weights": weights(model), "files": files, "names": names}

    def judge_shares(evidence, seed, inputs, targets):
        """Each rank sees a share of its own, and all together see everything."""
        require(all(rank["asked"] for rank in evidence), "a rank saw no samples at all: take them from `data`")
        first = [set(rank["asked"][: len(rank["asked"]) // 2]) for rank in evidence]
        seen, share = set().union(*first), -(-len(inputs) // 4)
        alone = f"the ranks train on the same samples ({len(first[0])} of {len(inputs)} on rank 0): each needs a share of its own"
        require(max(map(len, first)) <= share, alone)
        require(len(seen) == len(inputs), f"in an epoch only {len(seen)} of {len(inputs)} samples are seen by anybody")

    def judge_epochs(evidence, seed, inputs, targets):
        """The second epoch has another order than the first, and shares that are as disjoint."""
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
        moved = not same(evidence[0]["weights"], evidence[0]["before"])
        require(moved, "the weights have not changed: is there a backward pass and a step?")
        equal = all(same(rank["weights"], evidence[0]["weights"], 1e-6) for rank in evidence)
        require(
            equal,
            "the ranks' weights differ at the end: gradients are averaged only for a loss that the wrapper computed",
        )

    def judge_writer(evidence, seed, inputs, targets):
        """Rank 0 alone writes the checkpoint."""
        writers = [rank for rank, one in enumerate(evidence) if one["files"]]
        require(writers, "nobody wrote a checkpoint")
        require(len(writers) == 1, f"ranks {writers} all write the checkpoint: they would write over each other's file")
        require(writers == [0], f"rank {writers[0]} writes the checkpoint; by custom it is rank 0")
        require(
            evidence[0]["files"] == ["checkpoint.pt"], f"the files are {evidence[0]['files']}, not ['checkpoint.pt']"
        )

    def judge_names(evidence, seed, inputs, targets):
        """The checkpoint has the model's own names."""
        names = [name for rank in evidence for name in rank["names"]]
        require(names, 'the checkpoint has no "model" with named tensors')
        wrapped = [name for name in names if name.startswith("module.")]
        require(
            not wrapped,
            f"the checkpoint calls a tensor \"{''.join(wrapped[:1])}\": these are the wrapper's names, not the model's",
        )
        require(
            set(names) == {"0.weight", "0.bias", "2.weight", "2.bias"}, f"the checkpoint holds {sorted(set(names))[:6]}"
        )

    parts = {
        "shares": (1, judge_shares),
        "epochs": (1, judge_epochs),
        "weights": (1, judge_weights),
        "one writer": (1, judge_writer),
        "names": (1, judge_names),
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


@task("6.6", "mistakes")
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
        return [sorted(map(str, one)) if isinstance(one, set | frozenset | list | tuple) else one for one in found]

    def judge_named(evidence, runs, which=USUAL):
        """Every mistake by its word, and no other."""
        for found, (seen, wrong) in zip(evidence, runs, strict=True):
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

    parts = {"samples": (1, judge_data), "weights and files": (1, judge_model)}


SO = {
    "sampler": "the ranks' samples differ, but for one or two that fill up the last round",
    "epoch": "the two epochs have different orders",
    "wrapper": "all weights are equal",
    "writers": "only one rank wrote",
    "names": 'no name begins with "module."; it may stand inside of one',
}
