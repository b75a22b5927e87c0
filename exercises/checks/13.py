"""Exercise 13: a table that is too good, and all that predictions ask for.

The tasks are units and protocols, plans for 1,536 GPUs, rows held out, a layer, how far each way
reaches, and a figure in words. A task's `draw`, `probe` and `read` are what
`ddp_exercises.tasks.Task` says.
"""

from ddp_exercises.diagnosis import kind_of
from ddp_exercises.tasks import task

from .shared import as_it_is, form_of_explanation, nothing, require, several

# The Transformer's rows in Huang et al., NeurIPS 2019, Table 2, are (stages, micro-batches, how
# many times as fast as the first row).
GPIPE = [
    (2, 1, 1.0),
    (4, 1, 1.07),
    (8, 1, 1.3),
    (2, 4, 1.7),
    (4, 4, 3.2),
    (8, 4, 4.8),
    (2, 32, 1.8),
    (4, 32, 3.4),
    (8, 32, 6.3),
]


def formula(stages, micro_batches):
    """Return how many times as fast as one device a pipeline can be."""
    return stages * micro_batches / (micro_batches + stages - 1)


@task("13.1", "too_good", {"too good": 1, "possible": 1})
class TooGood:
    """Rows of a table that beat a formula which nothing can beat."""

    def draw(random):
        tables = {"GPipe's Transformer": GPIPE}
        for name, stages, batches in (
            ("over one device", 1, 1),
            ("over 4 stages and 8 micro-batches", 4, 8),
        ):
            first = formula(stages, batches)
            rows = [(stages, batches, 1.0)]
            # Rows are below what is possible or beyond it, never near it.
            shares = random.sample((0.7, 0.9, 1.08, 1.25), 4)
            for stages, share in zip((2, 4, 8, 16), shares, strict=True):
                batches = random.choice((2, 16, 32))
                rows.append((stages, batches, share * formula(stages, batches) / first))
            tables[name] = rows
        return {"tables": tables}

    def probe(too_good, tables):
        for name, rows in tables.items():
            returned = too_good(list(rows))
            require(
                hasattr(returned, "__iter__"),
                f"{name}: a list of pairs was expected, not {kind_of(returned)}",
            )
            named = []
            for pair in returned:
                several(pair, 2, f"{name}: return pairs: (stages, micro-batches)")
                named.append(tuple(pair))
            first_stages, first_batches, _ = rows[0]
            for stages, batches, times in rows:
                most = formula(stages, batches) / formula(first_stages, first_batches)
                case = (
                    f"{name}, {stages} stages, {batches} micro-batches, {times:.3g} times the"
                    " first row"
                )
                part = "too good" if times > 1.1 * most else "possible"
                verdict = "impossible" if (stages, batches) in named else "possible"
                yield part, case, verdict


@task("13.2", ("seconds", "crossover", "used"), {"seconds": 1, "crossover": 1, "used": 1})
class ReadABenchmark:
    """From bus bandwidth to time; where two protocols cross; one that is never the fastest."""

    def draw(random):
        benches = []
        for ranks in (2, 8, 32):
            benches.append((random.randrange(50, 500), 2 ** random.randrange(20, 34), ranks))
        start = random.uniform(2e-5, 5e-5)
        rate = random.uniform(5e9, 9e9)
        usual = {
            "LL": (start, rate),
            "LL128": (1.5 * start, 9 * rate),
            "Simple": (4 * start, 11 * rate),
        }
        # Here LL128 is never the fastest.
        slow_ll128 = usual | {"LL128": (1.5 * start, 1.1 * rate)}
        backwards = {name: usual[name] for name in ("Simple", "LL128", "LL")}
        return {"benches": benches, "machines": [usual, slow_ll128, backwards]}

    def probe(seconds, crossover, used, benches, machines):
        for bus, nbytes, ranks in benches:
            case = f"{bus} GB/s, {nbytes:,} bytes, {ranks} ranks"
            yield "seconds", case, seconds(bus, nbytes, ranks)
        for number, protocols in enumerate(machines):
            meeting = crossover(protocols["LL"], protocols["Simple"])
            yield "crossover", f"machine {number}, LL and Simple, in bytes", meeting
            names = used(dict(protocols))
            require(
                isinstance(names, list | tuple | set), f"machine {number}: return a list of names"
            )
            rates = [
                f"{name} {1e6 * start:.0f} µs, {rate:.2g} B/s"
                for name, (start, rate) in protocols.items()
            ]
            yield "used", f"machine {number} ({', '.join(rates)})", sorted(map(str, names))


MEGATRON = {
    "parameters": 174.6e9,
    "layers": 96,
    "batch": 1536,
    "gpus": 1536,
    "per_host": 8,
    "memory_gb": 80,
}


@task("13.3", ("kept_gb", "wrong_with"), {"memory": 1, "what is wrong": 2})
class Plans:
    """16 bytes per parameter, shared by some ways or all; five reasons why a plan cannot be."""

    def draw(random):
        # A plan has degrees of tensor, pipeline and data parallelism, and is sharded or not. The
        # word behind it names the first thing that is wrong with it.
        plans = [
            (8, 12, 16, False),  # nothing
            (1, 1, 1536, True),  # nothing
            (8, 6, 32, False),  # nothing
            (1, 1, 1536, False),  # memory
            (2, 24, 32, False),  # nothing
            (8, 12, 8, False),  # GPUs
            (8, 12, 32, True),  # GPUs
            (16, 12, 8, False),  # host
            (3, 4, 128, False),  # host
            (3, 32, 16, False),  # host
            (8, 64, 3, False),  # layers
            (1, 128, 12, False),  # layers
            (1, 3, 512, False),  # memory
            (4, 2, 192, True),  # nothing
            (8, 1, 192, False),  # memory
        ]
        cases = [(plan, MEGATRON) for plan in random.sample(plans, len(plans))]
        usual = (8, 12, 16, False)
        cases.append((usual, MEGATRON | {"batch": random.choice((1500, 1544))}))  # batch
        cases.append((usual, MEGATRON | {"memory_gb": 32}))  # memory
        cases.append((usual, MEGATRON | {"batch": 1552}))  # nothing: that is 97 times 16
        small = MEGATRON | {"parameters": 4e9, "layers": 24, "gpus": 8, "batch": 32}
        cases += [((1, 1, 8, False), small), ((2, 1, 4, False), small)]  # nothing
        return {"cases": cases}

    def probe(kept_gb, wrong_with, cases):
        for plan, job in cases:
            tensor, pipeline, data, sharded = plan
            about = f"{tensor} tensor x {pipeline} pipeline x {data} data"
            if sharded:
                about += ", sharded"
            about += f", batch {job['batch']}, {job['gpus']:,} GPUs of {job['memory_gb']} GB"
            yield "memory", f"{about}, GB per GPU", kept_gb(plan, dict(job))
            yield "what is wrong", about, wrong_with(plan, dict(job))


@task("13.4", ("predicted", "held_out"), {"prediction": 1, "held out": 2})
class HeldOut:
    """Two unknowns from two rows; the error on a row that the fit did not see."""

    def draw(random):
        tables = {}
        for name, noise in (("exact", 0.0), ("noisy", 0.06)):
            computing = random.uniform(1e4, 4e4)
            sending = random.uniform(5, 40)
            rows = []
            for gpus in (96, 384, 1536):
                error = random.uniform(1 - noise, 1 + noise)
                rows.append((gpus, (computing / gpus + sending) * error))
            tables[name] = random.sample(rows, len(rows))
        return {"tables": tables}

    def probe(predicted, held_out, tables):
        for name, rows in tables.items():
            fewest_gpus = sorted(rows)[:2]
            for gpus in (192, 3072):
                case = f"{name} rows of 96 and 384, on {gpus} GPUs"
                yield "prediction", case, predicted(list(fewest_gpus), gpus)
            errors = held_out(list(rows))
            require(isinstance(errors, dict), "return a dictionary: {GPUs: error}")
            require(
                set(errors) == {gpus for gpus, _ in rows},
                f"the keys of the dictionary are the GPUs of all three rows, not {list(errors)}",
            )
            for gpus, _ in sorted(rows):
                error = errors[gpus]
                case = f"{name} table, {gpus} GPUs held out, predicted over measured"
                ratio = 1 + error if isinstance(error, float) else error
                yield "held out", case, ratio


@task("13.5", ("passes", "fsdp_layer"), {"passes": 1, "layer": 2})
class LayerUnderFsdp:
    """What a layer computes, and what of its sending shows: bound by either, or by both."""

    def draw(random):
        layers = []
        for width in (1024, 4096, 8192):
            context = random.choice((512, 2048, 16384))
            weights = random.randrange(8, 14) * width**2
            tokens = random.randrange(1, 9) * context
            layers.append((weights, width, tokens, context))
        cases = []
        # In the last case the forward pass is bound by sending and the backward pass by computing.
        for forward, backward, choices in (
            (0.02, 0.05, (2, 8, 64)),
            (0.001, 0.002, (2, 8, 64)),
            (0.004, 0.04, (8, 64)),
        ):
            weights = random.randrange(150, 250) * 1e6
            gpus = random.choice(choices)
            cases.append((forward, backward, weights, gpus, random.uniform(3e10, 6e10)))
        return {"layers": layers, "cases": cases}

    def probe(passes, fsdp_layer, layers, cases):
        for weights, width, tokens, context in layers:
            answer = passes(weights, width, tokens, context)
            both = several(answer, 2, "two were expected: the seconds of both passes")
            text = f"{tokens} tokens in sequences of {context}, ms"
            of_weights = passes(weights, 0, tokens, context)
            of_attention = passes(0, width, tokens, context)
            for what, (forward, backward) in (
                (f"{weights:,} weights alone, no attention (width 0)", of_weights),
                (f"attention alone (no weights), width {width}", of_attention),
                (f"{weights:,} weights of width {width}", both),
            ):
                yield "passes", f"forward, {what}, {text}", 1000 * forward
                yield "passes", f"backward, {what}, {text}", 1000 * backward
        _, _, weights, _, rate = cases[0]
        alone = fsdp_layer(0.02, 0.05, weights, 1, rate)
        case = f"20 and 50 ms, {weights:,.0f} weights, one GPU, so that nothing is sent, in ms"
        yield "layer", case, 1000 * alone
        sending = fsdp_layer(0.0, 0.0, weights, 4, rate)
        case = (
            f"no computing, {weights:,.0f} weights, 4 GPUs, {rate / 1e9:.0f} GB/s, so that all is"
            " sending, in ms"
        )
        yield "layer", case, 1000 * sending
        for forward, backward, weights, gpus, rate in cases:
            about = f"{1000 * forward:.0f} and {1000 * backward:.0f} ms, {weights:,.0f} weights"
            about += f", {gpus} GPUs, {rate / 1e9:.0f} GB/s, in ms"
            yield "layer", about, 1000 * fsdp_layer(forward, backward, weights, gpus, rate)


def job_with_limits(random, replicas, tensor, per_host, weight_bytes, gradient_bytes):
    """Return a job whose limits are `replicas` + 0.5 and `tensor` + 0.5.

    So they lie half way between whole numbers.
    """
    tokens = random.randrange(2**18, 2**23)
    rate = random.randrange(100, 1200) * 10**12
    inner = 1024 * random.randrange(8, 64)
    # Weights are gathered in a forward pass of 2 flops a weight and token; in the backward pass of
    # 4 they are gathered again, and gradients are reduced.
    share = min(2 / weight_bytes, 4 / (weight_bytes + gradient_bytes))
    # The bandwidths bound K - 1: with these it is `replicas` - 0.5 and `tensor` - 0.5 at most.
    return {
        "tokens": tokens,
        "rate": rate,
        "between": (replicas - 0.5) * rate / (share * tokens),
        "inside": (tensor - 0.5) * rate / inner,
        "per_host": per_host,
        "weight_bytes": weight_bytes,
        "gradient_bytes": gradient_bytes,
        "inner": inner,
    }


@task(
    "13.6",
    ("most_sharded", "most_tensor", "most_together"),
    {"fully sharded": 1, "tensor parallel": 1, "both": 1},
)
class Limits:
    """How many GPUs each way feeds before one of them waits: what cancels, and what does not."""

    def draw(random):
        cases = []
        for tensor, per_host, weight_bytes, gradient_bytes in (
            (1, 8, 2, 2),
            (3, 8, 2, 4),
            (2, 8, 2, 2),
            (5, 6, 4, 2),
            (9, 8, 2, 4),
            (4, 4, 4, 2),
        ):
            replicas = random.choice((7, 60, 800, 5000)) + random.randrange(6)
            cases.append(
                job_with_limits(random, replicas, tensor, per_host, weight_bytes, gradient_bytes)
            )
        return {"cases": cases}

    def probe(most_sharded, most_tensor, most_together, cases):
        for job in cases:
            machine = f"{job['rate'] / 1e12:g} TFLOP/s"
            about = (
                f"{job['tokens']:,} tokens, {machine}, {job['between'] / 1e9:.3g} GB/s between hosts,"
                f" {job['weight_bytes']} bytes per weight, {job['gradient_bytes']} per gradient"
            )
            yield "fully sharded", about, most_sharded(dict(job))
            about = (
                f"inner width {job['inner']:,}, {machine}, {job['inside'] / 1e9:.3g} GB/s within a host"
                f" of {job['per_host']}"
            )
            yield "tensor parallel", about, most_tensor(dict(job))
            yield "both", f"both, {about}, {job['tokens']:,} tokens", most_together(dict(job))


@task("13.7", "explain_figure", {"text": 1, "ticks": 1})
class ExplainFigure:
    """A figure in the learner's own words, and which points the learner ticks; a teacher reads it."""

    draw = nothing
    probe = as_it_is
    read = form_of_explanation
