# %% [markdown]
# Answers to exercise 14 as learners write them. tests/support/answers.py says how to read this.

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


# %% 14.1 wrong: not by magnitude | go by magnitude
#- owed.abs().topk
#+ owed.topk
# %% 14.1 wrong: magnitudes travel | they have lost their sign
#- return owed[places],
#+ return owed.abs()[places],
# %% 14.1 wrong: no feedback | one of the
#- owed = gradient + left
#+ owed = gradient
# %% 14.1 wrong: nothing is kept | nothing is left
#- owed.index_fill(0, places, 0.0)
#+ torch.zeros_like(owed)
# %% 14.1 wrong: keeps all | what was sent must be gone
#- owed.index_fill(0, places, 0.0)
#+ owed
# %% 14.1 wrong: changes the gradient | the gradient was changed
#- owed = gradient + left
#+ owed = gradient.add_(left)
# %% 14.1 wrong: a share of places | were expected
#- max(1, round(share * len(owed)))
#+ 1
# %% 14.1 hidden: at least one is forgotten | were expected
#- max(1, round(share * len(owed)))
#+ round(share * len(owed))
# %% 14.2 right: the mean first
def meet(shared, own, velocity, all_reduce, world_size, rate, momentum):
    mean = own.clone()
    all_reduce(mean)
    mean = mean / world_size
    new = velocity.mul(momentum).add(shared - mean)
    return shared.sub(new, alpha=rate), new


# %% 14.2 right: weights in between
def meet(shared, own, velocity, all_reduce, world_size, rate, momentum):
    total = own - shared
    all_reduce(total)
    speed = velocity * momentum - total.div(world_size)
    return torch.sub(shared, speed * rate), speed


# %% 14.2 wrong: they do not meet | 0 all-reduces
#- all_reduce(change)
#+ pass
# %% 14.2 wrong: the sum | that is the sum of the changes
#- (shared - own) / world_size
#+ shared - own
# %% 14.2 wrong: the wrong way | they move away from the mean
#- (shared - own) / world_size
#+ (own - shared) / world_size
# %% 14.2 wrong: no rate | the rate is missing
#- shared - rate * velocity
#+ shared - velocity
# %% 14.2 wrong: no momentum | the momentum is missing
#- velocity = momentum * velocity + change
#+ velocity = change
# %% 14.2 wrong: the old velocity | the velocity has not changed
#- velocity = momentum * velocity + change
#-     return shared - rate * velocity, velocity
#+ new = momentum * velocity + change
#+     return shared - rate * new, velocity
# %% 14.2 wrong: only the weights | return a pair
#- return shared - rate * velocity, velocity
#+ return shared - rate * velocity
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
# %% 14.3 wrong: unchanged | places were never sent in 40 steps, negative ones
#- owed.abs().topk
#+ owed.topk
# %% 14.3 wrong: another line | was not sent is kept: right
#- return 6
#+ return 9
# %% 14.3 wrong: names the feedback | this is the feedback, and it is right
#- return 6
#+ return 4
# %% 14.3 wrong: no feedback | places were never sent in 40 steps
#- owed = gradient + kept.get(name, 0.0)
#+ owed = gradient
# %% 14.3 wrong: sends all | values sent in a step
#- sent[places] = owed[places]
#+ sent = owed.clone()
# %% 14.3 wrong: keeps what it sends | more was sent than there was
#- kept[name] = owed - sent
#+ kept[name] = owed
# %% 14.3 wrong: one store for all | places were never sent
#- kept[name] = owed - sent
#+ kept["all"] = owed - sent
# %% 14.3 wrong: the line's text | a plain int was expected
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
# %% 14.4 wrong: the fewest steps | compare by time
#- return steps * (compute_s + 8 * way["bytes"] / bits)
#+ return steps
# %% 14.4 wrong: the fewest bytes | never reaches a loss
#- return steps * (compute_s + 8 * way["bytes"] / bits)
#+ return way["bytes"]
# %% 14.4 wrong: no computing | another one needs
#- (compute_s + 8 * way["bytes"] / bits)
#+ (8 * way["bytes"] / bits)
# %% 14.4 wrong: bytes for bits | a byte has eight bits
#- return 8 * (n
#+ return (n
# %% 14.4 wrong: as many steps | each way needs its own number of steps
#- (n * plain["bytes"] - m * frugal["bytes"])
#+ n * (plain["bytes"] - frugal["bytes"])
# %% 14.4 wrong: turned over | turn it over
#- return 8 * (n * plain["bytes"] - m * frugal["bytes"]) / (compute_s * (m - n))
#+ return compute_s * (m - n) / (8 * (n * plain["bytes"] - m * frugal["bytes"]))
# %% 14.4 wrong: the seconds | is none of
#- return min(ways, key=lambda name: seconds(ways[name]))
#+ return min(seconds(way) for way in ways.values())
