import time
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, weights
from torch.nn.functional import cross_entropy

from ddp_course import launch, problems, stage1_single, stage8_pipeline
from ddp_course.errors import RankError
from ddp_course.measuring import timeline
from ddp_course.running import wire
from ddp_course.stage8_pipeline import (
    Instruction,
    Pipeline,
    bubble,
    check_schedule,
    gpipe,
    one_forward_one_backward,
    split,
    timetable,
)

SCHEDULES = [gpipe, one_forward_one_backward]
SHAPES = [(stages, microbatches) for stages in (1, 2, 3, 4, 7) for microbatches in (1, 2, 3, 8)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_take_the_time_and_leave_the_bubble_that_theory_says(schedule):
    for stages, microbatches in SHAPES:
        rows = timetable(schedule(stages, microbatches), forward=1, backward=2)
        length = max(end for row in rows for _, _, end in row)
        assert length == 3 * (microbatches + stages - 1)
        for row in rows:
            assert 1 - sum(end - start for _, start, end in row) / length == pytest.approx(bubble(stages, microbatches))
            assert all(earlier[2] <= later[1] for earlier, later in pairwise(row)), "two at once"


def most_held(instructions):
    held = [0]
    for action, _ in instructions:
        held.append(held[-1] + (1 if action == "forward" else -1))
    return max(held)


def test_one_forward_one_backward_holds_fewer_microbatches():
    for stages, microbatches in SHAPES:
        held = [most_held(rank) for rank in one_forward_one_backward(stages, microbatches)]
        assert held == [min(stages - stage, microbatches) for stage in range(stages)]
        assert [most_held(rank) for rank in gpipe(stages, microbatches)] == [microbatches] * stages


def drawn(schedule, width=18):
    """The rows of the module docstring's table."""
    lines = []
    for rank, row in enumerate(timetable(schedule)):
        cells = [". "] * width
        for instruction, start, end in row:
            for slot in range(int(start), int(end)):
                cells[slot] = instruction.action[0].upper() + str(instruction.microbatch)
        lines.append(f"rank {rank}   {' '.join(cells)}".removesuffix(" .  . ").removesuffix(" .  . ").rstrip())
    return lines


def test_the_table_in_the_docstring_is_what_the_code_does():
    table = [line[12:] for line in stage8_pipeline.__doc__.splitlines() if "rank" in line[:19] and "F0" in line]
    assert table == drawn(gpipe(3, 4)) + drawn(one_forward_one_backward(3, 4))


F, B = (lambda m: Instruction("forward", m)), (lambda m: Instruction("backward", m))


@pytest.mark.parametrize(
    "schedule, message",
    [
        ([[F(0), B(0), F(1)]], r"rank 0 runs forward on micro-batches \[0, 1\], not on 0 to 0 in order"),
        ([[F(0), F(1), B(1), B(0)]], r"rank 0 runs backward on micro-batches \[1, 0\], not on 0 to 1 in order"),
        ([[B(0), F(0)]], "backward before forward"),
        ([[F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)]], "wait for each other in a circle"),
    ],
)
def test_schedules_that_cannot_work_are_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        timetable(schedule)


def test_schedules_that_can_work_are_accepted():
    check_schedule([[F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)]])


def deep_model(seed=0):
    """Five layers with parameters, so that up to five ranks have something to do."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = [13, 17, 11, 19, 7, 9]
        layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
        activated = [module for layer in layers for module in (layer, torch.nn.Tanh())]
        return torch.nn.Sequential(*activated[:-1]).double()


def trained_alone():
    model = deep_model()
    losses = stage1_single.train(model, tiny_batches(), 0.1)
    return weights(model), torch.tensor(losses)


def trained_in_microbatches(microbatches):
    """One device that adds up the gradients of the same micro-batches: what a pipeline must equal bit for bit."""
    model = deep_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in tiny_batches():
        optimizer.zero_grad()
        for x, y in zip(inputs.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True):
            (cross_entropy(model(x), y) * (len(y) / len(targets))).backward()
        optimizer.step()
    return weights(model)


def pipelines():
    """Train with both schedules, whole and uneven micro-batches; at K = 4 on a 2 x 2 grid too."""
    results, rank, world_size = {}, dist.get_rank(), dist.get_world_size()
    for schedule in SCHEDULES:
        for microbatches in (1, 4, 5):
            model = deep_model(seed=rank)
            options = {"microbatches": microbatches, "schedule": schedule}
            losses = stage8_pipeline.train(model, tiny_batches(), 0.1, **options)
            same = torch.equal(weights(model), trained_in_microbatches(microbatches))
            results[schedule.__name__, microbatches] = weights(model), torch.tensor(losses), same
    if world_size == 4:
        model = deep_model(seed=rank)
        losses = stage8_pipeline.train(model, tiny_batches(rank // 2, 2), 0.1, stages=2)
        results["grid"] = weights(model), torch.tensor(losses), None
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_pipeline_equals_one_device(world_size):
    expected, expected_losses = trained_alone()
    ranks = launch(pipelines, world_size=world_size)
    for rank in ranks:
        for case, (result, losses, same_bits) in rank.items():
            assert torch.equal(result, ranks[0][case][0]), "ranks differ"
            assert (result - expected).abs().max() < 1e-14
            if case != "grid":
                assert (losses - expected_losses).abs().max() < 1e-14
                assert same_bits, "not the same additions"
    if world_size == 4:
        halves = [ranks[rank]["grid"][1] for rank in (0, 2)]
        assert (sum(halves) / 2 - expected_losses).abs().max() < 1e-14


def faulty(fault):
    class Faulty(Pipeline):
        def backward(self, microbatch):
            held = [parameter.grad for parameter in self.stage.parameters()]
            before = [None if gradient is None else gradient.clone() for gradient in held]
            super().backward(microbatch)
            if fault == "a micro-batch is dropped" and microbatch == 1:
                for parameter, gradient in zip(self.stage.parameters(), before, strict=True):
                    parameter.grad = gradient

        def step(self, inputs, targets):
            loss = super().step(inputs, targets)
            if fault == "the mean is taken over micro-batches twice":
                for parameter in self.stage.parameters():
                    parameter.grad /= self.microbatches
            return loss

    stage8_pipeline.Pipeline = Faulty
    if fault == "the parts differ in order":
        stage8_pipeline.Inbox.take = lambda self, sent, take=stage8_pipeline.Inbox.take: take(self, sent).roll(1, 0)
    model = deep_model()
    stage8_pipeline.train(model, tiny_batches(), 0.1)
    return weights(model)


@pytest.mark.parametrize(
    "fault",
    ["a micro-batch is dropped", "the mean is taken over micro-batches twice", "the parts differ in order"],
)
def test_the_oracle_rejects(fault):
    for result in launch(faulty, fault, world_size=2):
        assert (result - trained_alone()[0]).abs().max() > 1e-4


def against_torch(schedule):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = next(tiny_batches())
    ours = split(list(deep_model()), world_size)[rank]
    loss = Pipeline(ours, schedule=schedule).step(inputs, targets)
    theirs = split(list(deep_model()), world_size)[rank]
    stage = PipelineStage(theirs, rank, world_size, torch.device("cpu"))
    runs = (ScheduleGPipe if schedule is gpipe else Schedule1F1B)(stage, 4, loss_fn=cross_entropy)
    losses = []
    if rank == 0:
        runs.step(inputs)
    else:
        runs.step(target=targets if rank == world_size - 1 else None, losses=losses)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs), loss, [value.item() for value in losses]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_agrees_with_torchs_pipelining(schedule):
    ranks = launch(against_torch, schedule, world_size=3)
    assert max(difference for difference, *_ in ranks) < 1e-15
    assert [loss is None for _, loss, _ in ranks] == [True, True, False]
    assert ranks[-1][1] == pytest.approx(sum(ranks[-1][2]) / 4, abs=1e-14)


def transformer():
    problem = problems.make("bytes", parameters=60_000, context=16, dtype=torch.float64)
    model = problem.model()
    losses = stage8_pipeline.train(model, problem.batches(8, 2), 0.1)
    one = problem.model()
    expected = stage1_single.train(one, problem.batches(8, 2), 0.1)
    inputs, _ = next(problem.batches(8, 1))
    whole = torch.nn.Sequential(*one.layers())(inputs)
    return (weights(model) - weights(one)).abs().max(), losses, expected, torch.equal(whole, one(inputs))


def test_a_transformer_in_a_pipeline():
    for difference, losses, expected, same_layers in launch(transformer, world_size=2):
        assert difference < 1e-12 and losses == pytest.approx(expected, abs=1e-12) and same_layers


def traffic_of_a_step(schedule):
    stages = [torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.Linear(3, 2)]
    pipeline = Pipeline(stages[dist.get_rank()], 4, schedule)
    batch = torch.randn(10, 5), torch.randint(2, (10,))
    pipeline.step(*batch)
    with wire.counting() as traffic:
        pipeline.step(*batch)
    return traffic, pipeline.most_kept


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_activations_and_their_gradients_travel(schedule):
    first, middle, last = launch(traffic_of_a_step, schedule, world_size=3)
    assert [t.bytes_sent for t, _ in (first, middle, last)] == [10 * 7 * 4, 10 * (7 + 3) * 4, 10 * 3 * 4]
    assert [t.bytes_received for t, _ in (first, middle, last)] == [10 * 7 * 4, 10 * (7 + 3) * 4, 10 * 3 * 4]
    assert [t.messages_sent for t, _ in (first, middle, last)] == [4, 8, 4]
    assert [kept for _, kept in (first, middle, last)] == ([4, 4, 4] if schedule is gpipe else [3, 2, 1])


class Sleep(torch.autograd.Function):
    """Takes `seconds` forward and twice that backward, without needing a core of its own."""

    @staticmethod
    def forward(ctx, inputs, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Slow(torch.nn.Linear):
    def forward(self, inputs):
        return Sleep.apply(super().forward(inputs), 0.02)


def idle_share(schedule, microbatches):
    pipeline = Pipeline(Slow(4, 4), microbatches, schedule)
    batch = torch.randn(microbatches, 4), torch.randint(4, (microbatches,))
    pipeline.step(*batch)
    dist.barrier()
    start = time.perf_counter()
    with timeline.recording() as spans:
        pipeline.step(*batch)
    return start, time.perf_counter(), sum(s.seconds for s in spans if s.name in ("forward", "backward"))


def measured_bubble(schedule, microbatches, stages=3):
    """Idle share over all ranks from the common start to the last end; busy time is what the layers slept."""
    ranks = launch(idle_share, schedule, microbatches, world_size=stages)
    length = max(end for _, end, _ in ranks) - min(start for start, _, _ in ranks)
    return 1 - microbatches * 0.06 / length, [busy for *_, busy in ranks]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_measured_bubble_is_the_formula(schedule):
    """Never less, and on one of five attempts hardly more: the processor may be busy elsewhere."""
    for microbatches in (2, 6):
        formula = bubble(3, microbatches)
        for _ in range(5):
            measured, busy = measured_bubble(schedule, microbatches)
            assert measured >= formula - 0.01
            assert all(seconds >= microbatches * 0.06 for seconds in busy), "the layers did not run"
            if measured <= formula + 0.15:
                break
        else:
            pytest.fail(f"idle for {measured:.2f}, where the formula says {formula:.2f}")


def saved_bytes(schedule):
    """The most bytes that autograd kept for the backward pass at any moment of a step."""
    held, most = [0], [0]

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor
            held[0] += tensor.nbytes
            most[0] = max(most[0], held[0])

        def __del__(self):
            held[0] -= self.tensor.nbytes

    stage = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Tanh())
    pipeline = Pipeline(stage, 8, schedule, loss=lambda outputs, targets: outputs.mean())
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        pipeline.step(torch.ones(8, 1000).requires_grad_(), torch.zeros(8))
    return most[0]


def test_activation_memory_of_both_schedules():
    each = 2 * 1000 * 4  # two layers keep their output, one sample a micro-batch
    assert launch(saved_bytes, gpipe, world_size=3) == [8 * each] * 3
    assert launch(saved_bytes, one_forward_one_backward, world_size=3) == [3 * each, 2 * each, 1 * each]


def test_split_is_even_and_leaves_no_rank_without_parameters():
    layers = list(deep_model())
    for stages in (1, 2, 3, 4, 5):
        parts = split(layers, stages)
        assert [layer for part in parts for layer in part] == layers
        sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
        assert min(sizes) > 0
    equal = [torch.nn.Linear(4, 4) for _ in range(8)]
    assert [len(part) for part in split(equal, 4)] == [2, 2, 2, 2]
    assert [len(part) for part in split(equal[:2], 2)] == [1, 1]
    odd = [torch.nn.PReLU(parameters) for parameters in (5, 1, 1, 9, 1)]
    assert [len(part) for part in split(odd, 3)] == [1, 2, 2], "25 + 4 + 100 is the least sum of squares"


def test_models_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match="5 layers with parameters cannot be split over 6 ranks"):
        split(list(deep_model()), 6)
    with pytest.raises(ValueError, match="2 layers with parameters cannot be split over 3 ranks; use at most 2 ranks"):
        split([torch.nn.PReLU(), torch.nn.Tanh(), torch.nn.PReLU()], 3)
    shared = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="share a parameter"):
        split([shared, torch.nn.Linear(3, 3), torch.nn.Sequential(shared)], 2)
    with pytest.raises(ValueError, match="Linear is neither"):
        stage8_pipeline.layers_of(shared)


def refusals():
    messages = []
    for refused in (
        lambda: Pipeline(torch.nn.Linear(2, 2), 0),
        lambda: Pipeline(torch.nn.Linear(2, 2), 4).step(torch.ones(3, 2), torch.zeros(3).long()),
        lambda: Pipeline(torch.nn.Linear(2, 2), 2, lambda stages, m: [[F(0), B(0), F(1)]] * stages),
        lambda: stage8_pipeline.grid(3),
    ):
        try:
            refused()
        except ValueError as error:
            messages.append(str(error).split(";")[0])
    return messages


def test_bad_settings_are_refused():
    for messages in launch(refusals, world_size=2):
        assert messages[0] == "microbatches is 0"
        assert messages[1] == "a batch of 3 cannot be cut into 4 micro-batches"
        assert "rank 0 runs forward" in messages[2] or "rank 0 runs backward" in messages[2]
        assert messages[3] == "2 ranks cannot form pipelines of 3"


class Pair(torch.nn.Linear):
    """Returns two tensors."""

    def forward(self, inputs):
        return super().forward(inputs), inputs


def passed_on(odd):
    rank = dist.get_rank()
    stages = {
        "a tuple": [Pair(3, 3), torch.nn.Linear(3, 3)],
        "numbers": [torch.nn.Sequential(torch.nn.Linear(3, 3), Rounded()), torch.nn.Linear(3, 3)],
        "other shapes": [Wider(3, 3), Narrow(3, 3)],
        "15 dimensions": [Folded(3, 3), torch.nn.Linear(3, 3)],
    }
    Pipeline(stages[odd][rank], 2).step(torch.ones(4, 3), torch.zeros(4).long())


class Rounded(torch.nn.Module):
    """Returns integers."""

    def forward(self, inputs):
        return inputs.int()


class Wider(torch.nn.Linear):
    """Returns one column more each time."""

    columns = 3

    def forward(self, inputs):
        self.columns += 1
        return super().forward(inputs)[:, :1].expand(-1, self.columns)


class Folded(torch.nn.Linear):
    """Returns 15 dimensions a sample."""

    def forward(self, inputs):
        return super().forward(inputs).view(-1, *[1] * 14, 3)


class Narrow(torch.nn.Linear):
    """Needs three columns only."""

    def forward(self, inputs):
        return super().forward(inputs[:, :3])


@pytest.mark.parametrize(
    "odd, words",
    [
        ("a tuple", "rank 0 returns a tuple, but one tensor"),
        ("numbers", "of torch.int32 can"),
        ("other shapes", "their shape must stay the same"),
        ("15 dimensions", "cannot be passed on"),
    ],
)
def test_what_cannot_be_passed_on_is_said(odd, words):
    with pytest.raises(RankError, match=words):
        launch(passed_on, odd, world_size=2)


def frozen_and_in_place(schedule, microbatches):
    """A frozen first stage, then a layer that overwrites its input: gradients, and those of one device."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(5, 5), torch.nn.ReLU(inplace=True), torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)]
    layers[0].requires_grad_(False)
    inputs, targets = torch.randn(8, 5), torch.randint(3, (8,))
    cross_entropy(torch.nn.Sequential(*layers)(inputs), targets).backward()
    expected = [None if p.grad is None else p.grad.clone() for p in torch.nn.Sequential(*layers).parameters()]
    for parameter in torch.nn.Sequential(*layers).parameters():
        parameter.grad = None
    parts = [torch.nn.Sequential(layers[0]), torch.nn.Sequential(*layers[1:3]), torch.nn.Sequential(layers[3])]
    part = parts[dist.get_rank()]
    Pipeline(part, microbatches, schedule).step(inputs, targets)
    stage8_pipeline.average_part(part, dist.new_subgroups(1)[0])
    mine = [2 * parts.index(part), 2 * parts.index(part) + 2]
    return [p.grad for p in part.parameters()], expected[slice(*mine)]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_frozen_stage_and_a_layer_that_works_in_place(schedule, microbatches):
    ranks = launch(frozen_and_in_place, schedule, microbatches, world_size=3)
    assert ranks[0] == ([None, None], [None, None])
    for ours, theirs in ranks[1:]:
        assert all(torch.allclose(a, b, atol=1e-6) and b.abs().max() > 0 for a, b in zip(ours, theirs, strict=True))


def one_by_one(stages, microbatches):
    """A slow schedule: every micro-batch comes back before the next one leaves."""
    return [[one for m in range(microbatches) for one in (F(m), B(m))] for _ in range(stages)]


def posted(schedule):
    """What was posted and finished in a step, in order: (what, number of its kind, to or from whom)."""
    stages = [torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.Linear(3, 2)]
    pipeline, events, counts = Pipeline(stages[dist.get_rank()], 4, schedule), [], Counter()
    batch = torch.randn(8, 5), torch.randint(2, (8,))
    pipeline.step(*batch)

    def noting(name, post):
        def noted(tensor, peer, group=None):
            events.append((name, counts[name, peer], peer))
            counts[name, peer] += 1
            return post(tensor, peer, group)

        return noted

    wire.isend, wire.irecv = noting("isend", wire.isend), noting("irecv", wire.irecv)
    pipeline.step(*batch)
    return events


@pytest.mark.parametrize("schedule", [*SCHEDULES, one_by_one])
def test_no_receive_is_posted_before_what_its_sender_needs(schedule):
    ranks = launch(posted, schedule, world_size=3)
    everyone = schedule(3, 4)
    for rank, events in enumerate(ranks):
        sent = Counter()
        for name, number, peer in events:
            if name == "isend":
                sent[peer] += 1
                continue
            action = "forward" if peer < rank else "backward"
            before = everyone[peer][: everyone[peer].index(Instruction(action, number))]
            assert sent[peer] >= sum(one.action != action for one in before), f"rank {rank}: {events}"
    assert all(sum(name == "irecv" for name, *_ in events) == n for events, n in zip(ranks, (4, 8, 4), strict=True))


def test_one_receive_is_posted_ahead_as_soon_as_that_is_allowed():
    """The middle of three ranks: < from or to the rank before, > the rank behind."""
    events = launch(posted, one_forward_one_backward, world_size=3)[1]
    short = [f"{name[1]}{number}{'<' if peer == 0 else '>'}" for name, number, peer in events]
    assert " ".join(short) == "r0< r1< s0> r0> r2< s1> r1> s0< r3< s2> r2> s1< s3> r3> s2< s3<"


def test_not_all_gradients_are_kept_until_they_have_left():
    assert launch(gradients_on_their_way, world_size=2) == [0, 2], "the last two of eight"


def gradients_on_their_way():
    pipeline = Pipeline(torch.nn.Linear(3, 3), 8, gpipe)
    pipeline.step(torch.ones(8, 3), torch.zeros(8).long())
    return len(pipeline.returning)


def groups_of_both_directions():
    """The groups in which activations and gradients leave this rank."""
    activations, gradients = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    used, ordinary, rank = {"right": set(), "left": set()}, wire.isend, dist.get_rank()

    def isend(tensor, peer, group=None):
        used["right" if peer > rank else "left"].add({activations: "activations", gradients: "gradients"}.get(group))
        return ordinary(tensor, peer, group)

    wire.isend = isend
    pipeline = Pipeline(torch.nn.Linear(3, 3), 2, group=activations, gradient_group=gradients)
    pipeline.step(torch.ones(4, 3), torch.zeros(4).long())
    return used


def test_gradients_travel_in_the_group_that_is_theirs():
    ranks = launch(groups_of_both_directions, world_size=3)
    assert [rank["right"] for rank in ranks] == [{"activations"}, {"activations"}, set()]
    assert [rank["left"] for rank in ranks] == [set(), {"gradients"}, {"gradients"}]


def on_cuda():
    from ddp_course import rank_device

    model = deep_model(seed=dist.get_rank()).to(rank_device())
    batches = [(x.to(rank_device()), y.to(rank_device())) for x, y in tiny_batches()]
    losses = stage8_pipeline.train(model, batches, 0.1)
    return weights(model).cpu(), torch.tensor(losses)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda():
    expected, expected_losses = trained_alone()
    for result, losses in launch(on_cuda, world_size=2, device="cuda"):
        assert (result - expected).abs().max() < 1e-12 and (losses - expected_losses).abs().max() < 1e-12
