# %% [markdown]
# Answers to exercise 13 as learners write them. docs/CONTRIBUTING.md says how to read this.

# %% 13.1 right: a loop and a set
def too_good(rows):
    p0, m0, _ = rows[0]
    found = set()
    for p, m, times in rows:
        share = times * p0 * m0 / (m0 + p0 - 1) / (p * m / (m + p - 1))
        if share > 1.1:
            found.add((p, m))
    return found


# %% 13.1 right: idle shares
def too_good(rows):
    def busy(p, m):
        return p * (1 - (p - 1) / (m + p - 1))

    return [[p, m] for p, m, t in rows if t / busy(p, m) > 1.1 / busy(rows[0][0], rows[0][1])]


# %% 13.1 wrong: no first row | the first row is the unit of all others, and it is a pipeline too: compare with its formula
#- times > 1.1 * formula(p, m) / first
#+ times > 1.1 * formula(p, m)
# %% 13.1 wrong: lazy, as many times as stages | P stages are P times as fast only while none of them waits: look at the formula again
#- return stages * micro_batches / (micro_batches + stages - 1)
#+ return stages
# %% 13.1 wrong: no tenth | rounding and unlike machines explain a few percent: allow a tenth
#- 1.1 * formula
#+ formula
# %% 13.1 wrong: what is slower | the other way round: too good is a row that is faster than the formula allows
#- times > 1.1
#+ times < 1.1
# %% 13.1 wrong: GPipe's words are believed | this row is faster than the formula allows, by more than a tenth
#- return [(p, m) for p, m, times in rows if times > 1.1 * formula(p, m) / first]
#+ return []
# %% 13.1 told: whole rows | return pairs
#- [(p, m) for p, m, times in rows
#+ [(p, m, times) for p, m, times in rows
# %% 13.1 told: how many | a list of pairs was expected, not an int
#- return [(p, m) for p, m, times in rows if times > 1.1 * formula(p, m) / first]
#+ return len(rows)
# %% 13.1 wrong: a tenth is added | a tenth of what the formula says, not 0.1
#- times > 1.1 * formula(p, m) / first
#+ times > formula(p, m) / first + 0.1
# %% 13.1 wrong: on both sides | a row that is slower than the formula is possible: only what is faster is too good
#- times > 1.1 * formula(p, m) / first
#+ abs(times * first / formula(p, m) - 1) > 0.1
# %% 13.1 wrong: efficiency | that is a share, not a speed: P stages do P times as much of it
#- return stages * micro_batches / (micro_batches + stages - 1)
#+ return micro_batches / (micro_batches + stages - 1)
# %% 13.1 wrong: the first row's stages | the first row's number is its own formula's, not its number of stages
#- first = formula(*rows[0][:2])
#+ first = rows[0][0]
# %% 13.2 right: by the algorithm's bandwidth
def seconds(bus_gb_per_s, nbytes, ranks):
    algorithm = bus_gb_per_s / (2 * (ranks - 1) / ranks)
    return nbytes / algorithm / 10**9


def crossover(first, second):
    (a, r), (b, s) = first, second
    return (b - a) * r * s / (s - r)


def used(protocols):
    times = {name: (lambda n, a=a, r=r: a + n / r) for name, (a, r) in protocols.items()}
    return {min(times, key=lambda name: times[name](2**k)) for k in range(0, 40)}


# %% 13.2 right: against all others
def seconds(bus_gb_per_s, nbytes, ranks):
    return (2 - 2 / ranks) * nbytes / bus_gb_per_s * 1e-9


def crossover(first, second):
    return (first[0] - second[0]) / (1 / second[1] - 1 / first[1])


def used(protocols):
    names = []
    for name, mine in protocols.items():
        slower = [crossover(other, mine) for other in protocols.values() if other[1] < mine[1]]
        faster = [crossover(mine, other) for other in protocols.values() if other[1] > mine[1]]
        if max(slower, default=0) < min(faster, default=float("inf")):
            names.append(name)
    return tuple(names)


# %% 13.2 wrong: lazy, bytes over bandwidth | that reads it as bytes over time; bus bandwidth counts what a link carries, 2(K-1)/K of them
#- 2 * (ranks - 1) / ranks * nbytes / (1e9 * bus_gb_per_s)
#+ nbytes / (1e9 * bus_gb_per_s)
# %% 13.2 wrong: the other way round | the factor is upside down: links carry more than the message
#- 2 * (ranks - 1) / ranks * nbytes / (1e9 * bus_gb_per_s)
#+ nbytes * ranks / (2 * (ranks - 1)) / (1e9 * bus_gb_per_s)
# %% 13.2 wrong: a reduce-scatter | that is a reduce-scatter alone; the allgather sends as much again
#- 2 * (ranks - 1) / ranks
#+ (ranks - 1) / ranks
# %% 13.2 wrong: the rates subtracted | seconds per byte may be subtracted, bytes per second may not
#- / (1 / first[1] - 1 / second[1])
#+ * (second[1] - first[1])
# %% 13.2 wrong: where the faster one has made up for nothing | each byte of the first takes time, too: both lines rise
#- / (1 / first[1] - 1 / second[1])
#+ * second[1]
# %% 13.2 wrong: lazy, all of them | one of them never has its turn: when it overtakes the first, another one has done so already
#- while later
#+ return names
#+     while later
# %% 13.2 wrong: the ends only | the one in the middle has its turn here: look at a message in between
#- while later
#+ return [names[0], max(names, key=lambda name: protocols[name][1])]
#+     while later
# %% 13.2 told: one name | return a list of names
#- return fastest
#+ return 3
# %% 13.2 wrong: 2 to the 30th | a GB is 10^9 bytes here, not 2^30
#- 1e9 * bus_gb_per_s
#+ 2**30 * bus_gb_per_s
# %% 13.2 wrong: in bits | bandwidth and message are both in bytes: no factor of 8
#- * nbytes / (1e9 * bus_gb_per_s)
#+ * 8 * nbytes / (1e9 * bus_gb_per_s)
# %% 13.2 wrong: below zero | a number of bytes below zero: the signs do not fit together. start + bytes / rate is the same for both
#- (second[0] - first[0]) /
#+ (first[0] - second[0]) /
# %% 13.2 wrong: all of the bytes twice | each rank has its own part already: (K-1)/K of the bytes go around twice
#- 2 * (ranks - 1) / ranks * nbytes
#+ 2 * nbytes
# %% 13.3 right: a table of tests
def kept_gb(plan, job):
    parts = plan[0] * plan[1]
    if plan[3]:
        parts = parts * plan[2]
    return job["parameters"] * 16 / parts / 10**9


def wrong_with(plan, job):
    t, p, d, _ = plan
    tests = {
        "GPUs": t * p * d == job["gpus"],
        "host": t <= job["per_host"] and job["per_host"] % t == 0,
        "layers": job["layers"] / p == job["layers"] // p,
        "batch": job["batch"] % d == 0,
        "memory": kept_gb(plan, job) <= job["memory_gb"] * 9 / 10,
    }
    return next((word for word, passed in tests.items() if not passed), "nothing")


# %% 13.3 right: bytes by kind
def kept_gb(plan, job):
    tensor, pipeline, data, sharded = plan
    ways = tensor * pipeline * (data**sharded)
    return sum(job["parameters"] / ways * nbytes for nbytes in (2, 2, 4, 4, 4)) / 1e9


def wrong_with(plan, job):
    tensor, pipeline, data, sharded = plan
    if job["gpus"] != tensor * pipeline * data:
        return "GPUs"
    for word, whole, ways in (("host", "per_host", tensor), ("layers", "layers", pipeline), ("batch", "batch", data)):
        if job[whole] % ways != 0:
            return word
    if kept_gb(plan, job) / job["memory_gb"] > 0.9:
        return "memory"
    return "nothing"


# %% 13.3 wrong: copies always share | copies share their state only if the plan is sharded; else each keeps all of its part
#- data if sharded else 1
#+ data
# %% 13.3 wrong: nobody shares | sharded copies have a part each: divide by their number, too
#- data if sharded else 1
#+ 1
# %% 13.3 wrong: weights alone | that is 2 bytes per parameter, the weights; gradients, Adam's state and the float32 copy are 14 more
#- return 16 *
#+ return 2 *
# %% 13.3 wrong: layers are not split | tensor ways share each layer's weights, too
#- (tensor * pipeline *
#+ (pipeline *
# %% 13.3 wrong: 80 GB for the state | a tenth of the memory is for activations
#- > 0.9 * job["memory_gb"]
#+ > job["memory_gb"]
# %% 13.3 wrong: does not count the GPUs | how many GPUs do these ways make?
#- if tensor * pipeline * data != job["gpus"]:
#+ if False:
# %% 13.3 wrong: wide layers | where are the GPUs that share a layer? Count what a host has
#- if job["per_host"] % tensor:
#+ if False:
# %% 13.3 wrong: uneven stages | how many layers does each stage have?
#- if job["layers"] % pipeline:
#+ if False:
# %% 13.3 wrong: uneven copies | how many sequences does each copy have?
#- if job["batch"] % data:
#+ if False:
# %% 13.3 told: a sentence | the result is 'the batch does not come out even'; 'batch' was expected
#- return "batch"
#+ return "the batch does not come out even"
# %% 13.3 wrong: 2 to the 30th | a GB is 10^9 bytes here, not 2^30
#- job["parameters"] / 1e9 /
#+ job["parameters"] / 2**30 /
# %% 13.3 wrong: no wider than a host | three ranks to a layer do not divide a host of eight: then some layer's GPUs are on two hosts
#- if job["per_host"] % tensor:
#+ if tensor > job["per_host"]:
# %% 13.3 wrong: memory first | the first of the table's reasons counts: memory comes last
#-     if tensor * pipeline * data != job["gpus"]:
#-
#+     if kept_gb(plan, job) > 0.9 * job["memory_gb"]:
#+         return "memory"
#+     if tensor * pipeline * data != job["gpus"]:
#+
# %% 13.3 wrong: lazy, fewer GPUs will do | the ways have to make as many GPUs as there are, no fewer
#- != job["gpus"]
#+ > job["gpus"]
# %% 13.3 wrong: 18 bytes | 16 bytes per parameter were given, whatever they are made of
#- return 16 *
#+ return 18 *
# %% 13.3 wrong: sequences by GPUs | the sequences are shared by the copies, not by all GPUs
#- if job["batch"] % data:
#+ if job["batch"] % job["gpus"]:
# %% 13.3 wrong: shared by all GPUs | sharded copies have a part each: divide by their number, too; the other ways have divided the rest already
#- data if sharded else 1
#+ job["gpus"] if sharded else 1
# %% 13.4 right: a linear system
def predicted(two_rows, gpus):
    (k, t), (n, u) = two_rows
    a = (t - u) * k * n / (n - k)
    return t + a * (1 / gpus - 1 / k)


def held_out(rows):
    errors = {}
    for place, (gpus, measured) in enumerate(rows):
        others = rows[:place] + rows[place + 1 :]
        errors[gpus] = (predicted(others, gpus) - measured) / measured
    return errors


# %% 13.4 right: through numpy
import numpy as np


def predicted(two_rows, gpus):
    k, t = np.array(two_rows, dtype=float).T
    slope, offset = np.polyfit(1 / k, t, 1)
    return float(slope / gpus + offset)


def held_out(rows):
    table = dict(rows)
    return {k: predicted([pair for pair in table.items() if pair[0] != k], k) / table[k] - 1 for k in table}


# %% 13.4 wrong: all is computing | that halves with twice the GPUs; what is sent stays
#- return computing / gpus + slow - computing / few
#+ return slow * few / gpus
# %% 13.4 wrong: a straight line | that is a straight line over the GPUs; the time goes with 1/K
#- return computing / gpus + slow - computing / few
#+ return slow + (fast - slow) / (many - few) * (gpus - few)
# %% 13.4 wrong: sending forgotten | the sending is missing
#- return computing / gpus + slow - computing / few
#+ return computing / gpus
# %% 13.4 wrong: lazy, the fit has seen it | there the row itself was in the fit: an error of zero proves nothing
#- errors = {}
#+ return {gpus: 0.0 for gpus, _ in rows}
# %% 13.4 wrong: percents | in percent; as a share was asked for
#- / measured - 1
#+ / measured * 100 - 100
# %% 13.4 wrong: measured over predicted | that is measured over predicted: turn it round
#- errors[gpus] = predicted(others, gpus) / measured - 1
#+ errors[gpus] = measured / predicted(others, gpus) - 1
# %% 13.4 wrong: without the sign | which side? Predicted less than measured is an error below zero
#- errors[gpus] = predicted(others, gpus) / measured - 1
#+ errors[gpus] = abs(predicted(others, gpus) / measured - 1)
# %% 13.4 told: a list | return a dictionary
#- return errors
#+ return list(errors)
# %% 13.4 wrong: in seconds | that is a difference in seconds: the error is a share of what was measured
#- errors[gpus] = predicted(others, gpus) / measured - 1
#+ errors[gpus] = predicted(others, gpus) - measured
# %% 13.5 right: term by term
def passes(weights, width, tokens, context):
    matmul = weights * tokens / 117e12
    attend = context * width * tokens / 49.92e12
    return [matmul + attend, matmul * 2 + attend * 5 / 2]


def fsdp_layer(forward, backward, weights, gpus, rate):
    sent = 2 * weights * (1 - 1 / gpus) / rate
    total = 0
    for computing, sending in ((forward, sent), (backward, sent + sent)):
        short, long = sorted((computing, sending))
        total += long + short * 15 / 100
    return total


# %% 13.5 right: flops and bytes first
def passes(weights, width, tokens, context):
    flops = {"products": 2 * weights * tokens, "attention": 2 * context * width * tokens}
    rates = {"products": 234e12, "attention": 0.32 * 312e12}
    forward = {name: flops[name] / rates[name] for name in flops}
    return sum(forward.values()), 2 * forward["products"] + 2.5 * forward["attention"]


def fsdp_layer(forward, backward, weights, gpus, rate):
    nbytes = 2 * weights * (gpus - 1) / gpus
    gather = nbytes / rate
    first = forward + gather - 0.85 * min(forward, gather)
    second = backward + 2 * gather - 0.85 * min(backward, 2 * gather)
    return first + second


# %% 13.5 wrong: backward as long as forward | the backward pass has twice the products: gradients of inputs and of weights
#- return products + attention, 2 * products + 2.5 * attention
#+ return products + attention, products + attention
# %% 13.5 wrong: one rate for all | attention reaches 0.32 of the flops, not the share of the products
#- (0.32 * 312e12)
#+ (0.75 * 312e12)
# %% 13.5 wrong: the whole datasheet | the datasheet's flops are not reached: 0.75 of them by products, 0.32 by attention
#- (0.75 * 312e12)
#+ 312e12
#- (0.32 * 312e12)
#+ 312e12
# %% 13.5 wrong: all scores | half of all scores is masked: 2 flops each, not 4
#- attention = 2 * context
#+ attention = 4 * context
# %% 13.5 wrong: nothing is hidden | sending and computing run at the same time: the longer counts, and 0.15 of the shorter
#- return max(computing, sending) + 0.15 * min(computing, sending)
#+ return computing + sending
# %% 13.5 wrong: lazy, everything is hidden | a part of the shorter shows, too: 0.15 of it
#- return max(computing, sending) + 0.15 * min(computing, sending)
#+ return max(computing, sending)
# %% 13.5 wrong: gathered once | before the backward pass the weights are gathered again; and the gradients are scattered
#- longer(backward, 2 * ring)
#+ longer(backward, ring)
# %% 13.5 wrong: scattered after it | the gradients are scattered while the backward pass computes: a gather and a scatter are its sending
#- longer(backward, 2 * ring)
#+ longer(backward, ring) + ring
# %% 13.5 wrong: all bytes are sent | each GPU has its own part already: (K-1)/K of the bytes are sent
#- ring = (gpus - 1) / gpus * 2
#+ ring = 2
# %% 13.5 wrong: a byte per weight | a weight has 2 bytes
#- / gpus * 2 * weights
#+ / gpus * weights
# %% 13.5 told: the sum | two were expected
#- return products + attention, 2 * products + 2.5 * attention
#+ return 3 * products + 3.5 * attention
# %% 13.5 wrong: attention as products | attention takes 2.5 times as long backward, not twice
#- 2.5 * attention
#+ 2 * attention
# %% 13.5 wrong: a share of the computing | 0.15 of the *shorter* counts, which is not always the computing
#- 0.15 * min(computing, sending)
#+ 0.15 * computing
# %% 13.5 wrong: both passes as one | what one pass has to spare does not hide the other's messages: compare pass by pass
#- longer(forward, ring) + longer(backward, 2 * ring)
#+ longer(forward + backward, 3 * ring)
# %% 13.5 wrong: all but its own part, of each rank | (K-1)/K of the bytes are sent, not K-1 times as many
#- (gpus - 1) / gpus
#+ (gpus - 1)
# %% 13.5 wrong: the width is missing | attention takes 2 flops per token of the context *and* unit of width: the width is missing
#- 2 * context * width * tokens
#+ 2 * context * tokens
# %% 13.5 wrong: the context is missing | attention looks at every token of the context: the context is missing
#- 2 * context * width * tokens
#+ 2 * width * tokens
# %% 13.5 wrong: all tokens of the micro-batch | attention looks at the tokens of its own sequence, `context`, not at all of the micro-batch
#- 2 * context * width * tokens
#+ 2 * tokens * width * tokens
# %% 13.5 wrong: three times the products | the backward pass has twice the products, not three times: the forward pass is a pass of its own
#- 2 * products + 2.5
#+ 3 * products + 2.5
# %% 13.5 wrong: one flop per weight | a product is 2 flops per weight and token: a multiplication and an addition
#- 2 * weights * tokens
#+ weights * tokens
# %% 13.5 wrong: shares multiply | a share of the peak makes a pass longer: divide by 0.75 and 0.32
#- products = 2 * weights * tokens / (0.75 * 312e12)
#+ products = 0.75 * 2 * weights * tokens / 312e12
#- attention = 2 * context * width * tokens / (0.32 * 312e12)
#+ attention = 0.32 * 2 * context * width * tokens / 312e12
# %% 13.5 wrong: backward without attention | attention has a backward pass, too: 2.5 times its forward one
#- 2 * products + 2.5 * attention
#+ 2 * products
# %% 13.5 wrong: forward without attention | attention is a part of both passes
#- return products + attention,
#+ return products,
# %% 13.5 wrong: backward 2.5 times all | only attention takes 2.5 times as long backward; products take twice as long
#- 2 * products + 2.5 * attention
#+ 2.5 * (products + attention)
# %% 13.5 wrong: an all-reduce in each pass | that is a gather and a scatter in each pass: the forward pass only gathers the weights
#- longer(forward, ring)
#+ longer(forward, 2 * ring)
# %% 13.5 wrong: gathered in the forward pass alone | before each pass the weights are gathered, before the backward one too; after it the gradients are scattered
#- longer(backward, 2 * ring)
#+ backward
# %% 13.5 wrong: a share of the longer | the longer counts whole, and 0.15 of the *shorter* beside it
#- max(computing, sending) + 0.15 * min(computing, sending)
#+ 1.15 * max(computing, sending)
# %% 13.5 wrong: bits | `rate` is in bytes per second: nothing is multiplied by 8
#- * 2 * weights / rate
#+ * 2 * weights * 8 / rate
# %% 13.5 wrong: four bytes a weight | a weight has 2 bytes
#- * 2 * weights / rate
#+ * 4 * weights / rate
# %% 13.5 wrong: a share of the sending always | 0.15 of the *shorter* counts, which is not always the sending
#- max(computing, sending) + 0.15 * min(computing, sending)
#+ max(computing, sending) + 0.15 * sending
# %% 13.5 wrong: divided by K | each GPU sends (K-1)/K of a layer's bytes, not a K-th
#- (gpus - 1) / gpus * 2
#+ 1 / gpus * 2
# %% 13.5 wrong: one flop for attention | attention is 2 flops per token of the context, unit of width and token, with the mask already counted
#- 2 * context * width
#+ context * width
# %% 13.5 wrong: rates swapped | products reach 0.75 of the flops, attention 0.32: they have changed places
#-     products = 2 * weights * tokens / (0.75 * 312e12)
#-     attention = 2 * context * width * tokens / (0.32 * 312e12)
#+     products = 2 * weights * tokens / (0.32 * 312e12)
#+     attention = 2 * context * width * tokens / (0.75 * 312e12)
# %% 13.5 wrong: a share of a share | attention reaches 0.32 of the 312 Tflop/s, not of what products reach
#- (0.32 * 312e12)
#+ (0.32 * 0.75 * 312e12)
# %% 13.5 wrong: the forward pass counted twice | the forward pass is in it as well: the backward pass alone has twice the products and 2.5 times the attention
#- 2 * products + 2.5 * attention
#+ 3 * products + 3.5 * attention
# %% 13.5 wrong: six flops forward | forward a product is 2 flops per weight and token; 6 are both passes
#- products = 2 * weights
#+ products = 6 * weights
# %% 13.6 right: one more at a time
def most_sharded(job):
    def waits(gpus):
        tokens, others = job["tokens"] / gpus, (gpus - 1) / gpus / job["between"]
        gathered = others * job["weight_bytes"]
        forward = 2 * tokens / job["rate"]
        backward = 4 * tokens / job["rate"]
        return forward < gathered or backward < gathered + others * job["gradient_bytes"]

    gpus = 1
    while not waits(gpus + 1):
        gpus += 1
    return gpus


def most_tensor(job):
    best = 1
    for t in range(2, job["per_host"] + 1):
        computing = 4 * job["inner"] / t / job["rate"]
        summing = 2 * (t - 1) / t * 2 / job["inside"]
        if job["per_host"] % t == 0 and computing >= summing:
            best = t
    return best


def most_together(job):
    return most_sharded(job) * most_tensor(job)


# %% 13.6 right: flops per byte first
import math


def most_sharded(job):
    per_byte = job["rate"] / job["between"]
    tokens_needed = per_byte * max(job["weight_bytes"] / 2, (job["weight_bytes"] + job["gradient_bytes"]) / 4)
    return math.floor(job["tokens"] / tokens_needed) + 1


def most_tensor(job):
    limit = math.floor(job["inner"] * job["inside"] / job["rate"]) + 1
    t = min(limit, job["per_host"])
    while job["per_host"] % t:
        t -= 1
    return t


def most_together(job):
    return most_tensor(job) * most_sharded(job)


# %% 13.6 wrong: lazy, forward alone | that looks at the forward pass only: the backward pass sends weights and gradients
#- min(forward, backward)
#+ forward
# %% 13.6 wrong: backward alone | that looks at the backward pass only: in the forward pass the gather may take longer than its computing
#- min(forward, backward)
#+ backward
# %% 13.6 wrong: both passes as one | what one pass has to spare does not hide the other's messages: compare pass by pass
#- min(forward, backward)
#+ 6 / (2 * job["weight_bytes"] + job["gradient_bytes"])
# %% 13.6 wrong: an all-reduce as in DDP | that is DDP's all-reduce, two times the gradients; here weights are gathered, and gradients scattered once
#- min(forward, backward)
#+ 2 / job["gradient_bytes"]
# %% 13.6 wrong: two bytes always | look at `weight_bytes` and `gradient_bytes`: they need not be two
#- forward = 2 / job["weight_bytes"]
#+ forward = 1
#- 4 / (job["weight_bytes"] + job["gradient_bytes"])
#+ 1
# %% 13.6 wrong: the easier pass | that K suits one of the passes; the other one waits already
#- min(forward, backward)
#+ max(forward, backward)
# %% 13.6 wrong: one GPU too few | that is one too few: of K GPUs each has a K-th already, and sends (K-1)/K
#- int(1 + min
#+ int(0 + min
# %% 13.6 wrong: rounded up | with that many GPUs a pass waits a little: round down
#- int(1 + min
#+ int(2 + min
# %% 13.6 wrong: the wrong cable | shards are on all hosts: their messages travel `between` hosts
#- job["tokens"] * job["between"]
#+ job["tokens"] * job["inside"]
# %% 13.6 wrong: whole hosts only | K need not fill whole hosts: round down to a GPU
#- return int(1 + min(forward, backward) * job["tokens"] * job["between"] / job["rate"])
#+ return int(1 + min(forward, backward) * job["tokens"] * job["between"] / job["rate"]) // job["per_host"] * job["per_host"]
# %% 13.6 wrong: a host does not bound it | T is more than a host has, or does not divide it: the other ranks of the pair would be on another host
#- return max(t for t in range(1, job["per_host"] + 1) if t <= limit and job["per_host"] % t == 0)
#+ return int(limit)
# %% 13.6 wrong: T does not divide the host | so many ranks do not divide a host: some GPUs would be left over
#- return max(t for t in range(1, job["per_host"] + 1) if t <= limit and job["per_host"] % t == 0)
#+ return min(int(limit), job["per_host"])
# %% 13.6 wrong: a whole host always | a whole host is too many here: its all-reduce takes longer than the computing
#- limit = 1 + job["inner"] * job["inside"] / job["rate"]
#+ limit = job["per_host"]
# %% 13.6 wrong: powers of two | T need not be a power of two; it must divide the host
#- job["per_host"] % t == 0
#+ job["per_host"] % t == 0 and t in (1, 2, 4, 8)
# %% 13.6 wrong: sent once | a ring all-reduce sends everything twice: reduce-scatter, then allgather
#- 1 + job["inner"] * job["inside"]
#+ 1 + 2 * job["inner"] * job["inside"]
# %% 13.6 wrong: activations as large as weights | an activation has two bytes, whatever a weight has
#- job["inner"] * job["inside"] / job["rate"]
#+ job["inner"] * job["inside"] / job["rate"] * 2 / job["weight_bytes"]
# %% 13.6 wrong: less than a host | T may be all GPUs of a host: its last GPU counts, too
#- range(1, job["per_host"] + 1)
#+ range(1, max(2, job["per_host"]))
# %% 13.6 wrong: one layer of the pair | the pair has two products, `width` to `inner` and back: 4 flops for each token and pair of widths
#- 1 + job["inner"] * job["inside"]
#+ 1 + job["inner"] / 2 * job["inside"]
# %% 13.6 wrong: one rank of a pair too few | that is one too few: of T ranks each sends 2(T-1)/T of the outputs, not 2
#- limit = 1 + job["inner"] * job["inside"] / job["rate"]
#+ limit = max(1, job["inner"] * job["inside"] / job["rate"])
# %% 13.6 wrong: between hosts | the ranks of a pair are on one host: their messages travel `inside` it
#- job["inner"] * job["inside"]
#+ job["inner"] * job["between"]
# %% 13.6 wrong: replicas are no GPUs | that is the number of replicas: each of them has T GPUs
#- most_tensor(job) * most_sharded(job)
#+ most_sharded(job)
# %% 13.6 wrong: every GPU needs so many tokens | a *replica* needs so many tokens, not each of its GPUs: each sends only a T-th of the weights
#- most_tensor(job) * most_sharded(job)
#+ most_sharded(job) // most_tensor(job) * most_tensor(job)
# %% 13.6 wrong: a rank of a replica sends all weights | T ranks compute T times as fast, but each of them has, and sends, only a T-th of the weights
#- most_tensor(job) * most_sharded(job)
#+ most_tensor(job) * most_sharded({**job, "rate": job["rate"] * most_tensor(job)})
# %% 13.6 wrong: a sum | there are T GPUs in each replica: multiply
#- most_tensor(job) * most_sharded(job)
#+ most_tensor(job) + most_sharded(job)
# %% 13.6 told: a share of a GPU | was expected
#- return int(1 + min(forward, backward)
#+ return (1 + min(forward, backward)
# %% 13.6 wrong: a replica of a whole host | a replica has T ranks, the largest T of above, not all of a host
#- most_tensor(job) * most_sharded(job)
#+ job["per_host"] * most_sharded(job)
# %% 13.6 wrong: six flops | what one pass has to spare does not hide the other's messages: compare pass by pass, 2 flops and 4
#- min(forward, backward)
#+ 6 / (job["weight_bytes"] + job["gradient_bytes"])
# %% 13.6 wrong: two flops backward | the backward pass computes 4 flops per weight and token, while weights are gathered and gradients scattered
#- backward = 4
#+ backward = 2
# %% 13.6 wrong: upside down | more tokens and a faster network allow more GPUs: that is the wrong way round
#- int(1 + min(forward, backward) * job["tokens"] * job["between"] / job["rate"])
#+ int(1 + job["rate"] / (min(forward, backward) * job["tokens"] * job["between"]))
# %% 13.6 wrong: tokens of a GPU | that is how many tokens each GPU needs; the number of GPUs was asked for
#- int(1 + min(forward, backward) * job["tokens"] * job["between"] / job["rate"])
#+ int(job["rate"] / job["between"] / min(forward, backward))
# %% 13.6 wrong: the smaller of both | T ranks make one replica, and the replicas are sharded: multiply, do not choose
#- most_tensor(job) * most_sharded(job)
#+ min(most_tensor(job), most_sharded(job))
# %% 13.6 wrong: replicas of a host | a host has several replicas if T is smaller than it; their number is not multiplied by that: T times the replicas
#- most_tensor(job) * most_sharded(job)
#+ most_sharded(job) * job["per_host"] // most_tensor(job)
# %% 13.6 wrong: activations as large as weights, upside down | an activation has two bytes, whatever a weight has
#- job["inner"] * job["inside"] / job["rate"]
#+ job["inner"] * job["inside"] / job["rate"] / 2 * job["weight_bytes"]
# %% 13.6 wrong: backward too for a pair | only the pair's forward pass is compared with its all-reduce
#- job["inner"] * job["inside"] / job["rate"]
#+ 3 * job["inner"] * job["inside"] / job["rate"]
# %% 13.6 wrong: T times as many, in each pass | a *replica* needs so many tokens: T cancels, since each of its ranks sends a T-th
#- most_tensor(job) * most_sharded(job)
#+ most_tensor(job) ** 2 * most_sharded(job)
# %% 13.6 wrong: links shared by the host | `inside` is what *one* GPU sends: it is not shared by the GPUs of the host
#- job["inner"] * job["inside"] / job["rate"]
#+ job["inner"] * job["inside"] / job["per_host"] / job["rate"]
# %% 13.6 wrong: T times the tokens | T replicas' tokens give the formula's 1 only once: the number of *replicas* is rounded, and each has T GPUs
#- most_tensor(job) * most_sharded(job)
#+ most_sharded({**job, "tokens": job["tokens"] * most_tensor(job)})
# %% 13.6 wrong: within a host | shards are on all hosts: their messages travel `between` hosts
#- job["tokens"] * job["between"] /
#+ job["tokens"] * job["inside"] /
# %% 13.6 wrong: the smallest T | the largest T that fits was asked for
#- return max(t for t in
#+ return min(t for t in

# %% 13.7 right: one of the points
def explain_figure():
    return 'ZeRO-3 falls from 144 to 44, because a GPU has only a quarter of the work, but must still fetch all weights twice.', "A"


# %% 13.7 right: a list of letters
#- "ABC"
#+ ["A", "B", "C"]
# %% 13.7 told: lazy, a few words | at least twelve different words
#- return text, "ABC"
#+ return 'ZeRO-3 is 3.2 times slower.', "A"
# %% 13.7 told: lazy, one word many times | at least twelve different words
#- return text, "ABC"
#+ return "because " * 20 + "4", "A"
# %% 13.7 told: lazy, the figure's title | this stands in a lesson
def explain_figure():
    return 'On 1,536 GPUs three ways were 3.2 times as fast as ZeRO-3 (published; lines derived)', "A"


# %% 13.7 told: lazy, the lesson's own sentence | this stands in a lesson
#- return text, "ABC"
#+ return 'The seconds of sending stay the same, while the seconds of computing halve with twice the GPUs.' + " " + text, "ABC"
# %% 13.7 told: lazy, all is ticked | 3 points in
def explain_figure():
    return 'ZeRO-3 falls from 144 to 44, because a GPU has only a quarter of the work, but must still fetch all weights twice.', "ABC"


# %% 13.7 told: no number | name a number of the figure
#- return text, "ABC"
#+ return "".join(sign for sign in text if not sign.isdigit()), "ABC"
# %% 13.7 told: no letters | a pair was expected
#- return text, "ABC"
#+ return text
# %% 13.7 told: nothing ticked | tick at least one letter
#- return text, "ABC"
#+ return text, ""
# %% 13.7 told: another letter | 'X' is none of A, B and C
#- return text, "ABC"
#+ return text, "AX"
