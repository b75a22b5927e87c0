"""What a step of each stage should take on emulated devices: its compute, and the closed form of its communication.

ideal of        C seconds of compute on one device, p bytes, K ranks, links of b bytes per second
single          C
averaged        C/K + the closed form of its all-reduce (`theory`): 2(K-1) p/b, 2(K-1)/K p/b …
overlapping     the simulator's: a bucket travels when it is full and the one before has arrived
fully sharded   C/K, block by block: each waits until it has been gathered, while the next and the sums are on
                their way, one after the other
layers split    C of the slices of one rank + the closed form of each all-reduce of activations
pipeline        micro-batches through K parts: a pass begins when its rank is free and its message has arrived
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.functional import cross_entropy

from ..ladder import Stage
from ..running.devices import Device
from ..running.links import Link
from ..stage7_sharded.blocks import assign_blocks, default_blocks
from ..stage8_pipeline import layers_of, one_forward_one_backward, split, timetable
from . import theory
from .job import Job, played
from .simulate import Network, Profile, Simulation, simulate
from .simulate.network import Pause

MICROBATCHES = 4  # of stage 8, by default

Event = tuple[float, str, int]  # seconds of work until a block's "forward" or "backward" pass, or until it is "done"


def ideals(stages: list[Stage], job: Job, device: Device, link: Link | None) -> dict[str, float]:
    """{stage's key: milliseconds that its step should take on these devices and links}, without those of no formula."""
    costs = theory.Costs.of_link(link.bandwidth, link.latency) if link else theory.Costs(0.0, 0.0)
    return {stage.key: 1000 * STEPS[stage.step](stage, job, device, costs) for stage in stages if stage.step}


def alone(stage: Stage, job: Job, device: Device, costs: theory.Costs) -> float:
    """Seconds of a step of one device that computes the whole batch."""
    return job.work(device).compute_s


def averaged(stage: Stage, job: Job, device: Device, costs: theory.Costs) -> float:
    """Seconds of a step in which communication follows the backward pass."""
    nbytes, seconds = job.gradient_bytes, job.work(device, job.world_size).compute_s
    return seconds + theory.seconds(str(stage.all_reduce), nbytes, job.world_size, costs)


def overlapped(stage: Stage, job: Job, device: Device, costs: theory.Costs) -> float:
    """Seconds of a step whose buckets travel under the backward pass."""
    work = job.work(device, job.world_size)
    return simulate(work, job.world_size, Network(costs), str(stage.all_reduce), job.bucket_cap_mb).step_s


def gathered(stage: Stage, job: Job, device: Device, costs: theory.Costs) -> float:
    """Seconds of a step whose parameters are gathered block by block."""
    events, sizes = events_of(job, device)
    return fully_sharded(events, sizes, job.work(device, job.world_size), job.world_size, costs)


def in_parts(stage: Stage, job: Job, device: Device, costs: theory.Costs) -> float:
    """Seconds of a step of a pipeline."""
    return pipelined(*passes_of(job, device), costs) + job.work(device, job.world_size).update_s


def in_slices(stage: Stage, job: Job, device: Device, costs: theory.Costs) -> float:
    """Seconds of a step whose layers are split over all ranks."""
    seconds = played(job, job.slice_of_model([]), device).compute_s
    return seconds + sum(theory.seconds("ring", nbytes, job.world_size, costs) for nbytes in job.reduced_bytes)


STEPS = {
    "alone": alone, "averaged": averaged, "overlapped": overlapped, "gathered": gathered, "pipelined": in_parts,
    "split": in_slices,
}  # fmt: skip


def events_of(job: Job, device: Device) -> tuple[list[Event], list[int]]:
    """When a rank of stage 7 needs and is done with each block, by its device's clock; and the blocks' bytes."""
    model = job.model()
    inputs, targets = next(job.batches(0, job.world_size))
    blocks, events = assign_blocks(model, default_blocks(model)), []
    with device.emulate(sleep=False) as emulation:

        def watch(number, module, parameters):
            """Note the moments at which one block begins and ends to compute."""

            def note(kind):
                events.append((emulation.busy_s, kind, number))

            def after(module, inputs, outputs):
                outputs.register_hook(lambda _: note("backward"))

            def ready(parameter):
                missing.discard(parameter)
                if not missing:
                    note("done")

            missing = set(parameters)
            module.register_forward_pre_hook(lambda *_: note("forward"))
            module.register_forward_hook(after)
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(ready)

        for number, (module, parameters) in enumerate(blocks):
            watch(number, module, parameters)
        cross_entropy(model(inputs), targets).backward()
    return events, [sum(p.numel() * p.element_size() for p in parameters) for _, parameters in blocks]


def fully_sharded(events: list[Event], sizes: list[int], work: Profile, world_size: int, costs: theory.Costs) -> float:
    """Seconds of a step of stage 7 with prefetch, whose blocks have `sizes` bytes."""
    seconds = [(world_size - 1) * costs.message(nbytes / world_size) for nbytes in sizes]
    simulation, line = Simulation(Network(costs)), []

    def travel(number):
        """A gather or a sum leaves when the one before has arrived."""

        def message(before):
            yield from before
            yield Pause(seconds[number])

        line.append(simulation.start(0, message(line[-1:])))
        return line[-1]

    def compute():
        """Compute from event to event, and wait for what has not arrived."""
        worked, arriving = 0.0, {}
        for place, (moment, kind, number) in enumerate(events):
            yield Pause(moment - worked)
            worked = moment
            if kind == "done":  # its gradients are summed up
                travel(number)
                continue
            yield arriving.get((kind, number)) or travel(number)
            for later in [n for _, k, n in events[place + 1 :] if k == kind][:1]:
                arriving[kind, later] = travel(later)
        yield Pause(work.compute_s - work.update_s - worked)

    simulation.start(0, compute())
    return simulation.play() + work.update_s / world_size


def passes_of(job: Job, device: Device) -> tuple[list[tuple[float, float]], list[int]]:
    """For each rank of stage 8 the seconds of a micro-batch's forward and backward pass; and the bytes at each cut."""
    flowing, targets = next(job.problem.batches(job.global_batch // MICROBATCHES, 1, job.seed))
    passes, cuts = [], []
    parts = split(layers_of(job.model()), job.world_size)
    with device.emulate(sleep=False) as emulation:
        for number, part in enumerate(parts):
            begin = emulation.busy_s
            outputs = part(flowing.detach().requires_grad_() if number else flowing)
            if part is parts[-1]:
                outputs = cross_entropy(outputs, targets)
            middle = emulation.busy_s
            outputs.sum().backward()
            passes.append((middle - begin, emulation.busy_s - middle))
            cuts.append(outputs.numel() * outputs.element_size())
            flowing = outputs
    return passes, cuts[:-1]


def pipelined(
    passes: Sequence[tuple[float, float]], cuts: Sequence[int], costs: theory.Costs, microbatches: int = MICROBATCHES
) -> float:
    """Seconds until a pipeline of ranks with these `passes` has sent `microbatches` through, with `cuts` bytes each."""
    forward, backward = zip(*passes, strict=True)
    messages = [costs.message(nbytes) for nbytes in cuts]
    schedule = one_forward_one_backward(len(passes), microbatches)
    return max(row[-1][2] for row in timetable(schedule, forward, backward, message=messages))
