# %% [markdown]
# Answers to exercise 14 as learners write them. docs/CONTRIBUTING.md says how to read this.

# %% 14.1 right: sorted
def compress(gradient, left, share):
    whole = gradient.add(left)
    count = max(1, round(share * whole.numel()))
    order = sorted(range(len(whole)), key=lambda i: -abs(whole[i].item()))[:count]
    places = torch.tensor(order)
    rest = whole.clone()
    rest[places] = 0
    return whole[places], places, rest

# %% 14.1 right: a mask
def compress(gradient, left, share):
    total = gradient + left
    places = total.abs().argsort(descending=True)[: max(1, round(share * len(total)))].to(torch.int32)
    values = total[places.long()]
    mask = torch.ones_like(total)
    mask[places.long()] = 0
    return values, places, total * mask

# %% 14.1 wrong: not by magnitude | large negative values are never sent: go by magnitude
#- owed.abs().topk
#+ owed.topk

# %% 14.1 wrong: magnitudes travel | they have lost their sign
#- return owed[places],
#+ return owed.abs()[places],

# %% 14.1 wrong: no feedback | what was left before is missing: the largest of gradient + left are sent
#- owed = gradient + left
#+ owed = gradient

# %% 14.1 wrong: lazy, nothing is kept | nothing is left: keep all that was not sent
#- owed.index_fill(0, places, 0.0)
#+ torch.zeros_like(owed)

# %% 14.1 wrong: keeps all | what was sent must be gone from what is left
#- owed.index_fill(0, places, 0.0)
#+ owed

# %% 14.1 wrong: changes the gradient | the gradient was changed (aliasing): work on a copy
#- owed = gradient + left
#+ owed = gradient.add_(left)

# %% 14.1 wrong: a share of places | a single value travels; max(1, round(share * n)) were expected
#- max(1, round(share * len(owed)))
#+ 1

# %% 14.1 wrong: rounds down | one value is missing: round(share * n), not int
#- round(share * len(owed))
#+ int(share * len(owed))

# %% 14.1 told: at least one is forgotten | 1 was expected
#- max(1, round(share * len(owed)))
#+ round(share * len(owed))

# %% 14.1 wrong: the rest without what was left | what is left is owed minus what is sent, and the old `left` is a part of owed
#- owed.index_fill(0, places, 0.0)
#+ gradient.index_fill(0, places, 0.0)

# %% 14.1 wrong: chosen by the gradient | the places are chosen by the gradient alone: what was left is added before the largest are chosen
#- places = owed.abs()
#+ places = gradient.abs()

# %% 14.1 wrong: lazy, all is sent | all values are sent, so nothing is saved: max(1, round(share * n)) of them were asked for
#- max(1, round(share * len(owed)))
#+ len(owed)

# %% 14.2 right: the mean first
def outer_step(shared, own, velocity, all_reduce, world_size, rate, momentum):
    mean = own.clone()
    all_reduce(mean)
    mean = mean / world_size
    new = velocity.mul(momentum).add(shared - mean)
    return shared.sub(new, alpha=rate), new

# %% 14.2 right: weights in between
def outer_step(shared, own, velocity, all_reduce, world_size, rate, momentum):
    total = own - shared
    all_reduce(total)
    speed = velocity * momentum - total.div(world_size)
    return torch.sub(shared, speed * rate), speed

# %% 14.2 wrong: lazy, they do not meet | no all-reduces; one is enough
#- all_reduce(change)
#+ pass

# %% 14.2 wrong: the sum | that is the sum of the changes: divide by K
#- (shared - own) / world_size
#+ shared - own

# %% 14.2 wrong: the wrong way | they move away from the mean: the change is shared - mean
#- (shared - own) / world_size
#+ (own - shared) / world_size

# %% 14.2 wrong: no rate | the rate is missing
#- shared - rate * velocity
#+ shared - velocity

# %% 14.2 wrong: no momentum | the momentum is missing
#- velocity = momentum * velocity + change
#+ velocity = change

# %% 14.2 wrong: the old velocity | the velocity has not changed: return the new one
#- velocity = momentum * velocity + change
#-     return shared - rate * velocity, velocity
#+ new = momentum * velocity + change
#+     return shared - rate * new, velocity

# %% 14.2 told: only the weights | return a pair: (weights, velocity)
#- return shared - rate * velocity, velocity
#+ return shared - rate * velocity

# %% 14.2 wrong: the sum of weights | all_reduce gives a sum: divide by the number of ranks, once
#- change = (shared - own) / world_size
#+ change = own.clone()
#- all_reduce(change)
#+ all_reduce(change)
#+     change = shared - change

# %% 14.2 wrong: from its own weights | the step starts from the `shared` weights: from their own the ranks would go on apart
#- return shared - rate
#+ return own - rate

# %% 14.2 wrong: the velocity before this step | the step takes the velocity of before: first the velocity gets the change, then the weights move
#- velocity = momentum * velocity + change
#-     return shared - rate * velocity, velocity
#+ faster = momentum * velocity + change
#+     return shared - rate * velocity, faster

# %% 14.2 wrong: the change damped | the change is multiplied by 1 - momentum: this momentum adds all of it, v = momentum v + g
#- velocity + change
#+ velocity + (1 - momentum) * change

# %% 14.2 wrong: the rate in the velocity | the rate is in the velocity: it belongs to the weights' step only
#- velocity + change
#+ velocity + rate * change
#- shared - rate * velocity
#+ shared - velocity

# %% 14.2 wrong: the change multiplied, too | momentum multiplies the old velocity only, not this change
#- velocity = momentum * velocity + change
#+ velocity = momentum * (velocity + change)

# %% 14.2 told: lazy, torch's own all-reduce | your code calls torch.distributed.all_reduce
def outer_step(shared, own, velocity, all_reduce, world_size, rate, momentum):
    total = own.clone()
    torch.distributed.all_reduce(total)
    velocity = momentum * velocity + shared - total / world_size
    return shared - rate * velocity, velocity

# %% 14.3 right: sorting
def the_bug():
    return 6


def make_hook(share):
    kept = {}

    def hook(name, gradient):
        owed = gradient + kept.get(name, 0.0)
        count = max(1, round(share * owed.numel()))
        places = owed.abs().argsort(descending=True)[:count]
        sent = torch.zeros_like(owed).index_copy(0, places, owed[places])
        kept[name] = owed - sent
        return sent

    return hook

# %% 14.3 right: squares
#- owed.abs().topk
#+ owed.square().topk

# %% 14.3 told: unchanged | large negative values are not sent, however much is owed: go by magnitude
#- owed.abs().topk
#+ owed.topk

# %% 14.3 wrong: another line | what was not sent is kept: right. But some of it is kept for ever: why?
#- return 6
#+ return 9

# %% 14.3 wrong: line 1 | that line only names what it is given
#- return 6
#+ return 1

# %% 14.3 wrong: line 2 | what is kept begins empty, and that is right
#- return 6
#+ return 2

# %% 14.3 wrong: line 3 | that line only names what the hook is given
#- return 6
#+ return 3

# %% 14.3 wrong: line 5 | the number of values is right
#- return 6
#+ return 5

# %% 14.3 wrong: line 7 | this makes room for what is sent, and does
#- return 6
#+ return 7

# %% 14.3 wrong: line 8 | this takes the values at the places it is given: are they the right places?
#- return 6
#+ return 8

# %% 14.3 told: one memory for all names | for each name of each hook on its own?
#- gradient + kept.get(name, 0.0)
#+ gradient + kept.get("all", 0.0)
#- kept[name] = owed - sent
#+ kept["all"] = owed - sent

# %% 14.3 told: magnitudes travel | the values have lost their sign
#- sent[places] = owed[places]
#+ sent[places] = owed[places].abs()

# %% 14.3 wrong: names the feedback | this is the feedback, and it is right: what was kept is added
#- return 6
#+ return 4

# %% 14.3 told: no feedback | only this step's gradient counts: what was not sent is kept under the name
#- owed = gradient + kept.get(name, 0.0)
#+ owed = gradient

# %% 14.3 told: lazy, sends all | sends 24 values; a quarter of 24 are 6
#- sent[places] = owed[places]
#+ sent = owed.clone()

# %% 14.3 told: keeps what it sends | is everything kept that was not sent, nothing that was
#- kept[name] = owed - sent
#+ kept[name] = owed

# %% 14.3 told: one store for all | only this step's gradient counts
#- kept[name] = owed - sent
#+ kept["all"] = owed - sent

# %% 14.3 told: one store for all hooks | for each name of each hook on its own?
#- def make_hook(share):
#-     """Return the mended hook: `hook(name, gradient)` returns what is sent, and keeps the rest."""
#-     kept = {}
#+ kept = {}
#+
#+
#+ def make_hook(share):

# %% 14.3 told: the smallest | the smallest magnitudes are sent; the largest should be
#- topk(count)
#+ topk(count, largest=False)

# %% 14.3 told: chosen by the gradient | only this step's gradient counts
#- owed.abs().topk
#+ gradient.abs().topk

# %% 14.3 told: the line's text | a plain int was expected
#- return 6
#+ return "places = owed.topk(count).indices"

# %% 14.4 right: a loop
def winner(ways, target, compute_s, bits):
    best, found = None, None
    for name, way in ways.items():
        for step, loss in enumerate(way["losses"]):
            if loss <= target:
                seconds = (step + 1) * (compute_s + way["bytes"] * 8 / bits)
                if best is None or seconds < best:
                    best, found = seconds, name
                break
    return found


def break_even(plain, frugal, target, compute_s):
    n = 1 + [loss <= target for loss in plain["losses"]].index(True)
    m = 1 + [loss <= target for loss in frugal["losses"]].index(True)
    seconds_a_bit = compute_s * (m - n) / (8 * (n * plain["bytes"] - m * frugal["bytes"]))
    return 1 / seconds_a_bit

# %% 14.4 right: in bytes
#- return 8 * (n * plain["bytes"] - m * frugal["bytes"]) / (compute_s * (m - n))
#+ bytes_saved = n * plain["bytes"] - m * frugal["bytes"]
#+     return bytes_saved * 8 / compute_s / (m - n)

# %% 14.4 wrong: lazy, the fewest steps | that way needs the fewest steps, but what it sends in each of them takes time, too
#- return steps * (compute_s + 8 * way["bytes"] / bits)
#+ return steps

# %% 14.4 wrong: the fewest bytes | that way sends the fewest bytes, but never reaches that loss
#- return steps * (compute_s + 8 * way["bytes"] / bits)
#+ return way["bytes"]

# %% 14.4 wrong: no computing | that way has sent the least by then, but each step computes, too: fewer steps may be faster
#- (compute_s + 8 * way["bytes"] / bits)
#+ (8 * way["bytes"] / bits)

# %% 14.4 wrong: bytes for bits | a byte has eight bits
#- return 8 * (n
#+ return (n

# %% 14.4 wrong: as many steps | each way needs its own number of steps
#- (n * plain["bytes"] - m * frugal["bytes"])
#+ n * (plain["bytes"] - frugal["bytes"])

# %% 14.4 wrong: turned over | that is bytes times seconds: turn it over
#- return 8 * (n * plain["bytes"] - m * frugal["bytes"]) / (compute_s * (m - n))
#+ return compute_s * (m - n) / (8 * (n * plain["bytes"] - m * frugal["bytes"]))

# %% 14.4 told: the seconds | 'top 1 %' was expected
#- return min(ways, key=lambda name: seconds(ways[name]))
#+ return min(seconds(way) for way in ways.values())

# %% 14.4 wrong: below the target | a loss equal to the target counts: `target` or less
#- reached = (step for step, loss in enumerate(way["losses"], 1) if loss <= target)
#+ reached = (step for step, loss in enumerate(way["losses"], 1) if loss < target)

# %% 14.4 wrong: bits for bytes | a byte has eight bits
#- 8 * way["bytes"] / bits
#+ way["bytes"] / bits
#- return 8 * (n
#+ return (n

# %% 14.4 wrong: steps from zero | the first loss is that after step 1, so `enumerate` starts at 1
#- reached = (step for step, loss in enumerate(way["losses"], 1) if loss <= target)
#+ reached = (step for step, loss in enumerate(way["losses"]) if loss <= target)
#- return next(step for step, loss in enumerate(way["losses"], 1) if loss <= target)
#+ return next(step for step, loss in enumerate(way["losses"]) if loss <= target)

# %% 14.4 wrong: all steps | that is who ends first: what counts is the step in which the target is reached
#- return steps *
#+ steps = len(way["losses"]) if steps < float("inf") else steps
#+         return steps *

# %% 14.4 wrong: of one step | that compares one step of each: the frugal way needs more steps, so multiply by both numbers of steps
#- 8 * (n * plain["bytes"] - m * frugal["bytes"]) / (compute_s * (m - n))
#+ 8 * (plain["bytes"] - frugal["bytes"]) / compute_s

# %% 14.4 wrong: the lowest loss | what counts is the first step at which the target is reached, not the lowest loss
#- reached = (step for step, loss in enumerate(way["losses"], 1) if loss <= target)
#+ reached = (step for step, loss in enumerate(way["losses"], 1) if loss == min(way["losses"]))

# %% 14.5 right: floor of a half more
def int8_mean(gradient, left, gather):
    owed = gradient + left
    scale = owed.abs().amax(0, keepdim=True) / 127
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    values = torch.round(owed / safe).clamp(-127, 127).to(torch.int8)
    scales = gather(scale)
    parts = [v.float() * s for v, s in zip(gather(values), scales)]
    return torch.stack(parts).mean(0), owed - values.float() * scale

# %% 14.5 right: early for zeros
def int8_mean(gradient, left, gather):
    owed = left + gradient
    largest = owed.abs().max()
    unit = largest / 127 if largest > 0 else torch.tensor(1.0)
    small = torch.round(owed / unit).to(torch.int8)
    sent = gather(small)
    units = gather(unit.view(1))
    mean = sum(a.to(torch.float32) * b for a, b in zip(sent, units)) / len(sent)
    return mean, owed - small * unit

# %% 14.5 wrong: no feedback | what rounding has lost is not sent later: add `left` to the gradient
#- owed = gradient + left
#+ owed = gradient + 0

# %% 14.5 wrong: cut off | the values are cut off, not rounded, so all are too small
#- (owed / scale.clamp(min=1e-30)).round().to(torch.int8)
#+ (owed / scale.clamp(min=1e-30)).to(torch.int8)

# %% 14.5 wrong: one scale for all | the values of each rank are worth that rank's own scale
#- total += their_values * their_scale
#+ total += their_values * scale

# %% 14.5 wrong: 128 | 128 is too large for a byte and becomes -128: the largest magnitude is 127
#- owed.abs().max() / 127
#+ owed.abs().max() / 128

# %% 14.5 wrong: without sign | the largest *magnitude* gives the scale
#- owed.abs().max() / 127
#+ owed.max().clamp(min=0) / 127
#- .round().to(torch.int8)
#+ .round().clamp(-127, 127).to(torch.int8)

# %% 14.5 wrong: summed as bytes | sums of bytes do not fit into a byte: make float32 of each rank's values before adding
#-     total = torch.zeros_like(owed)
#-     for their_values, their_scale in zip(all_values, all_scales):
#-         total += their_values * their_scale
#+     total = torch.zeros_like(values)
#+     for their_values, their_scale in zip(all_values, all_scales):
#+         total += their_values
#+     total = total * scale

# %% 14.5 wrong: a sum | that is the sum over the ranks, not the mean
#- return total / len(all_values), owed
#+ return total, owed

# %% 14.5 wrong: lazy, four bytes each | four bytes per value are gathered, not one: int8
#- .round().to(torch.int8)
#+ .round()

# %% 14.5 told: no guard for zeros | where the scale is 0, divide by something else
#- scale.clamp(min=1e-30)
#+ scale

# %% 14.5 told: nan is left | is nan; 0 was expected
#- owed - values * scale
#+ owed - (owed / scale).round() * scale

# %% 14.5 wrong: left counts the gradient alone | what is left is owed minus what was sent, and owed has the old `left` in it
#- owed - values * scale
#+ gradient - values * scale

# %% 14.5 wrong: 128 and clamped | the largest magnitude becomes 127, so divide it by 127
#- owed.abs().max() / 127
#+ owed.abs().max() / 128
#- .round().to(torch.int8)
#+ .round().clamp(-127, 127).to(torch.int8)

# %% 14.5 wrong: a mean of scales | the values of each rank are worth that rank's own scale
#- total += their_values * their_scale
#+ total += their_values * torch.cat(all_scales).mean()

# %% 14.5 wrong: the other sign | what is left is owed minus what was sent, not the other way round
#- owed - values * scale
#+ values * scale - owed

# %% 14.5 wrong: nothing is left | what rounding has lost is owed minus what was sent, and is to be returned
#- owed - values * scale
#+ torch.zeros_like(owed)

# %% 14.5 wrong: left of the mean | what is left belongs to this rank: owed minus what *it* has sent, not minus the mean
#- owed - values * scale
#+ owed - total / len(all_values)

# %% 14.5 wrong: left is overwritten | `left` was changed: somebody else needs it
#- owed = gradient + left
#+ owed = left.add_(gradient)

# %% 14.5 wrong: the largest of all, with its sign | the largest *magnitude* gives the scale
#- owed.abs().max() / 127
#+ owed.max() / 127

# %% 14.5 wrong: the scale is upside down | the scale says what a 1 is worth: the largest magnitude divided by 127; a value is owed divided by it
#- their_values * their_scale
#+ their_values / their_scale

# %% 14.5 wrong: the gradient's largest | the scale is that of `owed`, the gradient with what was left: of the gradient alone it is too small for some
#- owed.abs().max() / 127
#+ gradient.abs().max() / 127

# %% 14.5 wrong: a mean of magnitudes | the largest magnitude becomes 127: a smaller scale makes large values overflow
#- owed.abs().max() / 127
#+ owed.abs().mean() / 127

# %% 14.5 wrong: up always | the values are rounded up, not to the nearest, so all are too large
#- .round().to(torch.int8)
#+ .ceil().to(torch.int8)

# %% 14.5 wrong: down always | the values are rounded down, not to the nearest, so all are too small
#- .round().to(torch.int8)
#+ .floor().to(torch.int8)

# %% 14.5 wrong: left twice | what was left is added twice
#- owed = gradient + left
#+ owed = gradient + 2 * left

# %% 14.5 wrong: left taken away | what was left is added to the gradient, not taken away
#- owed = gradient + left
#+ owed = gradient - left

# %% 14.5 wrong: left without the scale | what was sent is values *times the scale*
#- owed - values * scale
#+ owed - values

# %% 14.5 wrong: values alone | the values of each rank are worth that rank's own scale: multiply
#- their_values * their_scale
#+ their_values

# %% 14.5 wrong: left added up | what is left is what rounding loses *now*; the old `left` is in owed already
#- owed - values * scale
#+ owed - values * scale + left

# %% 14.5 wrong: left divided by K | what is left is all that this rank's rounding lost: it is not divided by K
#- owed - values * scale
#+ (owed - values * scale) / len(all_values)

# %% 14.5 wrong: no 127 | the largest magnitude becomes 127: the scale is a 127th of it
#- owed.abs().max() / 127
#+ owed.abs().max()

# %% 14.5 wrong: scales added | the values of each rank are worth that rank's own scale
#- their_values * their_scale
#+ their_values * sum(all_scales)

# %% 14.5 wrong: summed as bytes, times the mean scale | sums of bytes do not fit into a byte, and the values of each rank are worth that rank's own scale: multiply before adding
#-     total = torch.zeros_like(owed)
#-     for their_values, their_scale in zip(all_values, all_scales):
#-         total += their_values * their_scale
#+     total = sum(all_values).float() * (sum(all_scales) / len(all_scales))

# %% 14.5 told: a plain number | the scale is a tensor of one number
#- gather(scale.reshape(1))
#+ gather(scale.item())

# %% 14.5 wrong: unsigned | int8 has a sign, uint8 has none: -1 becomes 255
#- values = (owed / scale.clamp(min=1e-30)).round().to(torch.int8)
#+ values = (owed / scale.clamp(min=1e-30)).round().to(torch.uint8)

# %% 14.5 wrong: lazy, rounded but sent in float32 | what was rounded travels in float32, four bytes each: gather int8 values and a scale
def int8_mean(gradient, left, gather):
    owed = gradient + left
    scale = owed.abs().max() / 127
    sent = (owed / scale.clamp(min=1e-30)).round() * scale
    return torch.stack(gather(sent)).mean(0), owed - sent

# %% 14.5 wrong: lazy, K is 3 | there are not always three ranks: divide by their number, len of what is gathered
#- return total / len(all_values)
#+ return total / 3

# %% 14.6 right: one of the points
def explain_figure():
    return 'On 5 Mbit/s a step mostly waits for its bytes, so top 1 % is through ten times as early as an average in each step.', "A"


# %% 14.6 right: a list of letters
#- "ABC"
#+ ["A", "B", "C"]
# %% 14.6 told: lazy, a few words | at least twelve different words
#- return text, "ABC"
#+ return 'The link of 5 Mbit/s is slower.', "A"
# %% 14.6 told: lazy, one word many times | at least twelve different words
#- return text, "ABC"
#+ return "because " * 20 + "4", "A"
# %% 14.6 told: lazy, the figure's title | this stands in a lesson
def explain_figure():
    return 'On 5 Mbit/s, the fewer bytes a way sends, the sooner it is done (loss measured, time derived)', "A"


# %% 14.6 told: lazy, the lesson's own sentence | this stands in a lesson
#- return text, "ABC"
#+ return 'The bands show the best and the worst of three seeds: a difference smaller than a band says nothing.' + " " + text, "ABC"
# %% 14.6 told: lazy, all is ticked | 3 points in
def explain_figure():
    return 'On 5 Mbit/s a step mostly waits for its bytes, so top 1 % is through ten times as early as an average in each step.', "ABC"


# %% 14.6 told: no number | name a number of the figure
#- return text, "ABC"
#+ return "".join(sign for sign in text if not sign.isdigit()), "ABC"
# %% 14.6 told: no letters | a pair was expected
#- return text, "ABC"
#+ return text
# %% 14.6 told: nothing ticked | tick at least one letter
#- return text, "ABC"
#+ return text, ""
# %% 14.6 told: another letter | 'X' is none of A, B and C
#- return text, "ABC"
#+ return text, "AX"
