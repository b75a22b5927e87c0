# %% [markdown]
# Answers to exercise 8 as learners write them. docs/CONTRIBUTING.md says how to read this.

# %% 8.1 right: two loops
def gpipe(stage, stages, micro_batches):
    steps = []
    for kind in "FB":
        for micro_batch in range(micro_batches):
            steps.append([kind, micro_batch])
    return steps

# %% 8.1 right: a generator
def gpipe(stage, stages, micro_batches):
    for kind in "FB":
        yield from ((kind, m) for m in range(micro_batches))

# %% 8.1 right: sorted
def gpipe(stage, stages, micro_batches):
    every = [(kind, m) for m in range(micro_batches) for kind in ("F", "B")]
    return sorted(every, key=lambda step: (step[0] == "B", step[1]))

# %% 8.1 wrong: in turn | a backward pass starts before the last forward pass: that is another schedule
#- [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]
#+ [(kind, m) for m in range(micro_batches) for kind in "FB"]

# %% 8.1 wrong: backward in reverse | micro-batch 0 comes first
#- [("B", m) for m in range(micro_batches)]
#+ [("B", m) for m in reversed(range(micro_batches))]

# %% 8.1 wrong: no backward | each micro-batch goes backward, too
#-  + [("B", m) for m in range(micro_batches)]

# %% 8.1 wrong: counts from one | micro-batches are counted from 0
#- [("F", m) for m in range(micro_batches)]
#+ [("F", m) for m in range(1, micro_batches + 1)]

# %% 8.1 wrong: one too many | there is no such micro-batch: they are counted from 0
#- [("B", m) for m in range(micro_batches)]
#+ [("B", m) for m in range(micro_batches + 1)]

# %% 8.1 wrong: backward first | a micro-batch goes backward before it went forward
#- [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]
#+ [("B", m) for m in range(micro_batches)] + [("F", m) for m in range(micro_batches)]

# %% 8.1 told: a set | a list of steps was expected, not a set
#- return [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]
#+ return {("F", 0), ("B", 0)}

# %% 8.1 told: returns nothing | a list of steps was expected, not None
#- return [
#+ steps = [

# %% 8.1 told: as words | each step is a pair such as ("F", 0)
#- ("B", m)
#+ f"B{m}"

# %% 8.1 wrong: as many as stages | there is a pass for each micro-batch, not for each stage
#- return [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]
#+ return [("F", m) for m in range(stages)] + [("B", m) for m in range(stages)]

# %% 8.1 told: lazy, the course's own | your code calls stage8_pipeline.schedules.gpipe
def gpipe(stage, stages, micro_batches):
    from ddp_course import stage8_pipeline

    return [(each.letter, each.microbatch) for each in stage8_pipeline.gpipe(stages, micro_batches)[stage]]

# %% 8.2 right: counters
def one_forward_one_backward(stage, stages, micro_batches):
    steps, forward, backward = [], 0, 0
    while backward < micro_batches:
        if forward < micro_batches and forward - backward < stages - stage:
            steps.append(("F", forward))
            forward += 1
        else:
            steps.append(("B", backward))
            backward += 1
    return steps

# %% 8.2 right: interleave
def one_forward_one_backward(stage, stages, micro_batches):
    ahead = stages - stage - 1
    steps = []
    for tick in range(micro_batches + ahead):
        if tick < micro_batches:
            steps.append(("F", tick))
        if tick >= ahead:
            steps.append(("B", tick - ahead))
    return steps

# %% 8.2 wrong: lazy, that is GPipe | all forward passes come first: that is GPipe
#- warm_up = min(stages - 1 - stage, micro_batches)
#+ warm_up = micro_batches

# %% 8.2 wrong: no warm-up | the last stage goes backward after 1, the one before it after 2
#- min(stages - 1 - stage, micro_batches)
#+ 0

# %% 8.2 wrong: warm-up by stage | the last stage goes backward after 1, the one before it after 2
#- stages - 1 - stage
#+ stage

# %% 8.2 wrong: one more | the last stage goes backward after 1, the one before it after 2
#- stages - 1 - stage
#+ stages - stage

# %% 8.2 wrong: no cool-down | the last ones never go backward
#- return steps + [("B", m) for m in range(micro_batches - warm_up, micro_batches)]
#+ return steps

# %% 8.2 wrong: few micro-batches not expected | there may be fewer micro-batches than stages
#- min(stages - 1 - stage, micro_batches)
#+ stages - 1 - stage

# %% 8.2 wrong: backward of the newest | micro-batch 0 goes backward first
#- ("B", m - warm_up)
#+ ("B", m)

# %% 8.2 wrong: same for all stages | the last stage goes backward after 1, the one before it after 2
#- stages - 1 - stage
#+ stages - 1

# %% 8.2 wrong: backward before forward | after the warm-up each turn is a forward pass and then a backward pass: here the backward pass comes before the forward pass that it needs
#- ("F", m), ("B", m - warm_up)
#+ ("B", m - warm_up), ("F", m)

# %% 8.2 wrong: few micro-batches, one more | with fewer micro-batches than stages there are no more than those: the warm-up has min(…, micro_batches)
#- warm_up = min(stages - 1 - stage, micro_batches)
#+ warm_up = stages - stage
#- ("F", m), ("B", m - warm_up)
#+ ("B", m - warm_up), ("F", m)

# %% 8.2 told: lazy, the course's own | your code calls stage8_pipeline.schedules.one_forward_one_backward
def one_forward_one_backward(stage, stages, micro_batches):
    from ddp_course import stage8_pipeline

    rows = stage8_pipeline.one_forward_one_backward(stages, micro_batches)
    return [(each.letter, each.microbatch) for each in rows[stage]]

# %% 8.2 told: one too few | forward passes before the first backward pass are too few: the last stage goes backward after 1
#- min(stages - 1 - stage, micro_batches)
#+ max(0, min(stages - 2 - stage, micro_batches))

# %% 8.2 told: two too many | forward passes before the first backward pass are too many: the last stage goes backward after 1
#- min(stages - 1 - stage, micro_batches)
#+ min(stages + 1 - stage, micro_batches)

# %% 8.2 told: the newest that waits | goes backward before micro-batch 2: the oldest goes first
def one_forward_one_backward(stage, stages, micro_batches):
    warm_up = min(stages - 1 - stage, micro_batches)
    waiting = list(range(warm_up))
    steps = [("F", m) for m in waiting]
    for m in range(warm_up, micro_batches):
        waiting.append(m)
        steps += [("F", m), ("B", waiting.pop())]
    return steps + [("B", m) for m in reversed(waiting)]

# %% 8.3 right: when each is done
def bubble(times, micro_batches):
    free = [0] * len(times)
    for _ in range(micro_batches):
        arrived = 0
        for stage, duration in enumerate(times):
            arrived = free[stage] = max(arrived, free[stage]) + duration
    return sum(free[-1] - micro_batches * duration for duration in times) / (free[-1] * len(times))

# %% 8.3 right: a number of numpy's
import numpy as np


def bubble(times, micro_batches):
    times = np.array(times)
    total = times.sum() + (micro_batches - 1) * times.max()
    return np.mean(1 - micro_batches * times / total)

# %% 8.3 right: a fraction
from fractions import Fraction


def bubble(times, micro_batches):
    total = sum(times) + (micro_batches - 1) * max(times)
    return 1 - Fraction(micro_batches * sum(times), len(times) * total)

# %% 8.3 wrong: lazy, equal stages | that holds for equal stages: all others wait for the slowest one
#-     total = sum(times) + (micro_batches - 1) * max(times)
#-     return 1 - micro_batches * sum(times) / (len(times) * total)
#+     return (len(times) - 1) / (micro_batches + len(times) - 1)

# %% 8.3 wrong: slowest everywhere | the first micro-batch takes each stage's own time; only those after it come at the slowest one's pace
#- sum(times) + (micro_batches - 1) * max(times)
#+ (micro_batches + len(times) - 1) * max(times)

# %% 8.3 wrong: busy share | that is the share of busy time
#- return 1 - micro_batches
#+ return micro_batches

# %% 8.3 wrong: per cent | that is in per cent
#-     return 1 - micro_batches * sum(times) / (len(times) * total)
#+     return 100 * (1 - micro_batches * sum(times) / (len(times) * total))

# %% 8.3 wrong: over busy time | that is idle time over busy time; the share of all time was asked for
#- 1 - micro_batches * sum(times) / (len(times) * total)
#+ len(times) * total / (micro_batches * sum(times)) - 1

# %% 8.3 wrong: one micro-batch too many | the first micro-batch is in sum(times) already: M-1 follow it
#- (micro_batches - 1) * max
#+ micro_batches * max

# %% 8.3 wrong: the slow stage's own | that is the idle time of the slowest stage alone, not the average
#- micro_batches * sum(times) / (len(times) * total)
#+ micro_batches * max(times) / total

# %% 8.3 wrong: the least busy stage | that is the idle share of the stage that is idle most; the average over all stages was asked for
#- sum(times) / (len(times) * total)
#+ min(times) / total

# %% 8.3 wrong: in seconds | those are units of time, not a share: divide by the time from first to last
#- return 1 - micro_batches * sum(times) / (len(times) * total)
#+ return total - micro_batches * sum(times) / len(times)

# %% 8.3 wrong: rounded | the share was rounded: return it as it is
#- return 1 - micro_batches * sum(times) / (len(times) * total)
#+ return round(1 - micro_batches * sum(times) / (len(times) * total), 2)

# %% 8.3 told: lazy, the course's own | your code calls stage8_pipeline.schedules.bubble
def bubble(times, micro_batches):
    from ddp_course import stage8_pipeline

    return stage8_pipeline.bubble(len(times), micro_batches)

# %% 8.4 right: a set
def most_held(steps):
    waiting, largest = set(), 0
    for kind, micro_batch in steps:
        if kind == "F":
            waiting.add(micro_batch)
        else:
            waiting.remove(micro_batch)
        largest = max(largest, len(waiting))
    return largest

# %% 8.4 right: accumulate
from itertools import accumulate


def most_held(steps):
    return max(accumulate(1 if step[0] == "F" else -1 for step in steps))

# %% 8.4 right: a number of numpy's
import numpy as np


def most_held(steps):
    return np.cumsum([1 if kind == "F" else -1 for kind, _ in steps]).max()

# %% 8.4 wrong: lazy, all forward passes | that is how many there are; those that went backward are released
#- return most
#+ return sum(kind == "F" for kind, _ in steps)

# %% 8.4 wrong: at the end | that is what is left at the end; the most at any time was asked for
#- return most
#+ return held

# %% 8.4 wrong: never released | that is how many there are; those that went backward are released
#- else -1
#+ else 0

# %% 8.4 wrong: lazy, before the first backward | forward passes before the first backward are not always the peak
#- return most
#+ return [kind for kind, _ in steps].index("B")

# %% 8.4 wrong: all steps | that counts passes; only forward passes that wait for their backward hold memory
#- return most
#+ return len(steps)

# %% 8.4 wrong: peak minus one | a backward pass releases its micro-batch when it is done, so the peak is before it
#- return most
#+ return most - 1

# %% 8.4 wrong: from the oldest to the newest | between the oldest and the newest that wait, others have gone backward
def most_held(steps):
    waiting, most = set(), 0
    for kind, m in steps:
        if kind == "F":
            waiting.add(m)
        else:
            waiting.discard(m)
        if waiting:
            most = max(most, max(waiting) - min(waiting) + 1)
    return most

# %% 8.4 wrong: the longest run of forward passes | a backward pass releases its own micro-batch alone: the others that went forward still wait
#- held += 1 if kind == "F" else -1
#+ held = held + 1 if kind == "F" else 0

# %% 8.4 wrong: the difference of numbers | a backward pass releases its own micro-batch alone, not those with smaller numbers
def most_held(steps):
    last, most = -1, 0
    for kind, m in steps:
        if kind == "B":
            last = m
        else:
            most = max(most, m - last)
    return most

# %% 8.4 told: returns nothing | is there a `return`?
#-     return most

# %% 8.4 wrong: one less than there are | that is how many there are, less one: count those that went forward and not yet backward
#-     held = most = 0
#-
#+     return sum(kind == "B" for kind, _ in steps) - 1
#+     held = most = 0
#+

# %% 8.5 right: by simulation of the ticks
def schedule(stages, micro_batches):
    orders = []
    for stage in range(stages):
        steps, weights = [("F", m) for m in range(min(stages - 1 - stage, micro_batches))], 0
        forward = len(steps)
        for backward in range(micro_batches):
            if forward < micro_batches:
                steps += [("F", forward)]
                forward += 1
            steps += [("B", backward)]
            if backward - weights >= stage:
                steps += [("W", weights)]
                weights += 1
        while weights < micro_batches:
            steps += [("W", weights)]
            weights += 1
        orders.append(steps)
    return orders

# %% 8.5 right: as tuples
#- return orders
#+ return tuple(tuple(map(list, steps)) for steps in orders)

# %% 8.5 told: 1F1B | 1F1B needs
#- if m >= stage:  # the later the stage, the longer its W can wait
#+ if True:

# %% 8.5 told: all W at the end | only W releases one
#- if m >= stage:  # the later the stage, the longer its W can wait
#+ if False:

# %% 8.5 told: W waits the wrong way round | only W releases one
#- if m >= stage:  # the later the stage, the longer its W can wait
#+ if m >= stages - 1 - stage:

# %% 8.5 wrong: no W | each micro-batch has its W, too
#- orders.append(steps + [("W", m) for m in range(done, micro_batches)])
#+ orders.append(steps)

# %% 8.5 told: W before its B | F comes first, then B, then W
#- steps = [("F", m) for m in range(warm_up)]
#+ steps = [("F", m) for m in range(warm_up)] + [("W", 0)]
#- for m in range(done, micro_batches)]
#+ for m in range(done, micro_batches) if m]
#- if m >= stage:  # the later the stage, the longer its W can wait
#+ if 1 <= stage <= m and done:

# %% 8.5 told: one stage only | a list of steps for each stage was expected
#- return orders
#+ return orders[0]

# %% 8.5 told: no warm-up | it has BFW for micro-batch 0
#- warm_up = stages - 1 - stage
#+ warm_up = -1
#- steps = [("F", m) for m in range(warm_up)]
#+ steps = []
#- if warm_up + m < micro_batches:
#-                 steps.append(("F", warm_up + m))
#-             steps.append(("B", m))
#+ steps += [("B", m), ("F", m)]

# %% 8.5 wrong: no W | each micro-batch needs its W, too: there are none
#- steps.append(("W", done))
#+ pass
#- return orders
#+ return [[step for step in order if step[0] != "W"] for order in orders]

# %% 8.5 told: lazy, the course's own | your code calls stage8_pipeline.schedules.zero_bubble
def schedule(stages, micro_batches):
    from ddp_course import stage8_pipeline

    rows = stage8_pipeline.zero_bubble(stages, micro_batches)
    return [[(each.letter, each.microbatch) for each in row] for row in rows]

# %% 8.5 told: lazy, everything is held | the most micro-batches that a stage holds (only W releases one)
def schedule(stages, micro_batches):
    order = [(kind, m) for kind in "FBW" for m in range(micro_batches)]
    return [order for _ in range(stages)]

# %% 8.6 right: by overlap
def read(timeline):
    stages = 1 + max(span[0] for span in timeline)
    times = [[end - start for s, kind, _, start, end in timeline if s == stage and kind == "F"] for stage in range(stages)]
    slow = max(range(stages), key=lambda stage: sum(times[stage]))
    ends = {(s, kind, m): end for s, kind, m, _, end in timeline}
    begins = {(s, kind, m): start for s, kind, m, start, _ in timeline}
    if begins[0, "F", 1] >= ends[0, "B", 0]:
        return ["one at a time", slow]
    if begins[stages - 1, "B", 0] < begins[stages - 1, "F", 1]:
        return ["1F1B", slow]
    return ["GPipe", slow]

# %% 8.6 right: by the shortest wait
#- slow = max(took, key=took.get)
#+ slow = sorted(took.items(), key=lambda pair: -pair[1])[0][0]

# %% 8.6 told: lazy, by the end | look at how long its own steps take
#- slow = max(took, key=took.get)
#+ slow = max(timeline, key=lambda span: span[4])[0]

# %% 8.6 told: lazy, always the last | look at how long its own steps take
#- slow = max(took, key=took.get)
#+ slow = max(took)

# %% 8.6 told: counts from one | look at how long its own steps take
#- slow = max(took, key=took.get)
#+ slow = max(took, key=took.get) + 1

# %% 8.6 wrong: never one at a time | the first stage goes backward after its first forward pass already: there is one micro-batch at a time
#- if first[1][0] == "B":
#+ if False:

# %% 8.6 wrong: the first stage decides | the first stage begins with several forward passes in GPipe as in 1F1B: look at what the last one does second
#- "1F1B" if last[1][0] == "B" else "GPipe"
#+ "1F1B" if first[1][0] == "B" else "GPipe"

# %% 8.6 told: only the schedule | return a pair: (schedule, slow stage)
#- return name, slow
#+ return name

# %% 8.6 told: words of one's own | the result is 'sequential'; 'one at a time' was expected
#- return "one at a time", slow
#+ return "sequential", slow

# %% 8.6 wrong: not sorted | the timeline is in any order: sort each stage's steps by when they start
#- first = [(kind, m) for stage, kind, m, _, _ in ordered if
#+ first = [(kind, m) for stage, kind, m, _, _ in timeline if
#- last = [(kind, m) for stage, kind, m, _, _ in ordered if
#+ last = [(kind, m) for stage, kind, m, _, _ in timeline if

# %% 8.7 right: with autograd.grad
def forward(stage, number):
    if stage.before is not None:
        incoming = torch.zeros(*stage.shape)
        wire.recv(incoming, stage.before)
        x = incoming.requires_grad_(True)
    else:
        x = stage.inputs[number].clone().requires_grad_(True)
    output = stage.module(x)
    if stage.after is not None:
        wire.send(output.detach().clone(), stage.after)
    stage.kept[number] = (x, output)


def backward(stage, number):
    x, output = stage.kept.pop(number)
    if stage.after is not None:
        gradient = torch.zeros_like(output)
        wire.recv(gradient, stage.after)
        torch.autograd.backward(output, gradient)
    else:
        (stage.loss(output, stage.targets[number]) / stage.microbatches).backward()
    if stage.before is not None:
        wire.send(x.grad, stage.before)

# %% 8.7 right: receives and sends posted, then waited for
def forward(stage, number):
    x = stage.inputs[number] if stage.before is None else torch.empty(stage.shape)
    if stage.before is not None:
        wire.irecv(x, stage.before).wait()
    x = x.requires_grad_()
    y = stage.module(x)
    if stage.after is None:
        y = stage.loss(y, stage.targets[number])
    else:
        wire.isend(y.detach(), stage.after).wait()
    stage.kept[number] = {"x": x, "y": y}


def backward(stage, number):
    kept = stage.kept.pop(number)
    gradient = torch.tensor(1 / stage.microbatches)
    if stage.after is not None:
        gradient = torch.empty(kept["y"].shape)
        wire.irecv(gradient, stage.after).wait()
    kept["y"].backward(gradient)
    if stage.before is not None:
        wire.isend(kept["x"].grad, stage.before).wait()

# %% 8.7 wrong: not divided | the loss of the batch is the mean over all micro-batches: divide by their number
#- stage.loss(y, stage.targets[number]) / stage.microbatches
#+ stage.loss(y, stage.targets[number])

# %% 8.7 told: no gradient for what came in | asks for one before the module runs: requires_grad_()
#-         x.requires_grad_()

# %% 8.7 wrong: lazy, never dropped | a micro-batch is kept after its backward pass: take it out of `kept`
#- stage.kept.pop(number)
#+ stage.kept[number]

# %% 8.7 wrong: a gradient of ones | each stage begins backward anew: the gradient of its output comes from the stage after
#-         wire.recv(gradient, stage.after)
#-         y.backward(gradient)
#+         wire.recv(gradient, stage.after)
#+         y.backward(torch.ones_like(y))

# %% 8.7 wrong: the activation goes back | what goes back is the gradient of the input, not the input
#- wire.send(x.grad, stage.before)
#+ wire.send(x.detach(), stage.before)

# %% 8.7 wrong: each target is the first | every micro-batch has its own target
#- stage.targets[number]
#+ stage.targets[0]

# %% 8.7 wrong: each input is the first | every micro-batch has its own input
#- stage.inputs[number]
#+ stage.inputs[0]

# %% 8.7 wrong: sent twice | one message for each pass and neighbour is enough
#- wire.send(y.detach(), stage.after)
#+ wire.send(y.detach()[:1], stage.after); wire.send(y.detach()[1:], stage.after)
#- wire.recv(x, stage.before)
#+ wire.recv(x[:1], stage.before); wire.recv(x[1:], stage.before)

# %% 8.7 told: nothing goes back | its input's gradient to the one before
#-     if stage.before is not None:
#-         wire.send(x.grad, stage.before)

# %% 8.7 wrong: divided at every stage | the last stage's loss is a mean already: gradients on their way back are not divided again
#- wire.send(x.grad, stage.before)
#+ wire.send(x.grad / stage.microbatches, stage.before)

# %% 8.7 wrong: divided twice | the loss is divided by the number of micro-batches more than once
#- / stage.microbatches
#+ / stage.microbatches / stage.microbatches

# %% 8.7 wrong: the last one alone | the gradients of the other micro-batches are gone: they add up in `.grad`, so nothing clears them in between
#- x, y = stage.kept.pop(number)
#+ x, y = stage.kept.pop(number); stage.module.zero_grad()

# %% 8.7 wrong: the gradient of the output goes back | a stage in the middle hands on the gradient of its output; what goes back is that of its input, x.grad
#-     if stage.before is not None:
#-         wire.send(x.grad, stage.before)
#+     if stage.before is not None:
#+         wire.send(x.grad if stage.after is None else gradient, stage.before)

# %% 8.7 wrong: targets from the end | every micro-batch has its own target
#- stage.targets[number]
#+ stage.targets[stage.microbatches - 1 - number]

# %% 8.7 wrong: multiplied | the loss is multiplied by the number of micro-batches; a mean is divided by it
#- / stage.microbatches
#+ * stage.microbatches

# %% 8.7 wrong: divided by the number of stages | the loss is divided by the number of stages; the mean is over micro-batches
#- / stage.microbatches
#+ / 3

# %% 8.7 told: one micro-batch is kept | is each micro-batch kept under its own number
#-     stage.kept[number] = x, y
#+     stage.kept[0] = x, y
#-     x, y = stage.kept.pop(number)
#+     x, y = stage.kept[0]

# %% 8.7 told: detached and kept | the graph is gone
#-     stage.kept[number] = x, y
#+     stage.kept[number] = x, y.detach()

# %% 8.7 told: rank 0 is false | rank 0 counts as false, so ask `is None`
#-     if stage.before is None:
#+     if not stage.before:

# %% 8.7 told: a loss at every stage | only the last stage has one: there `after` is None
#-     if stage.after is None:
#-         y = stage.loss
#+     if True:
#+         y = stage.loss

# %% 8.7 told: lazy, a buffer for any shape | gloo lets that pass, NCCL does not; a tensor is as long as what comes into it
#-         x = torch.empty(stage.shape)
#-         wire.recv(x, stage.before)
#+         x = torch.empty(1000)
#+         wire.recv(x, stage.before)
#+         x = x[:15].view(stage.shape).clone()


# %% 8.8 right: one of the points
def explain_figure():
    return 'With one micro-batch on 4 ranks, one rank works and three wait, so 75 % of the time is idle.', "A"


# %% 8.8 right: a list of letters
#- "ABC"
#+ ["A", "B", "C"]
# %% 8.8 told: lazy, a few words | at least twelve different words
#- return text, "ABC"
#+ return "It is 20 % faster so.", "A"
# %% 8.8 told: lazy, one word many times | at least twelve different words
#- return text, "ABC"
#+ return "because " * 20 + "4", "A"
# %% 8.8 told: lazy, all is ticked | 3 points in 17 different words
def explain_figure():
    return 'With one micro-batch on 4 ranks, one rank works and three wait, so 75 % of the time is idle.', "ABC"


# %% 8.8 told: no number | name a number of the figure
#- return text, "ABC"
#+ return "".join(sign for sign in text if not sign.isdigit()), "ABC"
# %% 8.8 told: no letters | a pair was expected
#- return text, "ABC"
#+ return text
# %% 8.8 told: nothing ticked | tick at least one letter
#- return text, "ABC"
#+ return text, ""
# %% 8.8 told: another letter | 'X' is none of A, B and C
#- return text, "ABC"
#+ return text, "AX"
