"""Stage 7 on the streams of a GPU that only keeps time (support/virtual_gpu.py): overlap, order,
memory.
"""

import weakref
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from virtual_gpu import Stream, VirtualGPU

from ddp_course import launch
from ddp_course.stage7_sharded import FullyShardedDataParallel, blocks, fsdp

LAYERS, GATHER, FORWARD, BACKWARD, REDUCE = 6, 3.0, 4.0, 8.0, 5.0
BLOCK, WRAPPER = blocks.Block, fsdp.FullyShardedDataParallel


class Product(torch.autograd.Function):
    """inputs x weight, which takes the GPU its time and reads the memory of the weight."""

    @staticmethod
    def forward(ctx, inputs, weight, layer):
        ctx.layer = layer
        ctx.save_for_backward(inputs, weight)
        layer.gpu.work(f"forward {layer.number}", FORWARD, reads=[layer.gpu.whole[layer.number]])
        return inputs * weight

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        ctx.layer.gpu.work(
            f"backward {ctx.layer.number}", BACKWARD, reads=[ctx.layer.gpu.whole[ctx.layer.number]]
        )
        return gradient * weight, gradient * inputs, None


class Layer(torch.nn.Module):
    """A block."""

    def __init__(self, gpu, number):
        super().__init__()
        self.gpu, self.number = gpu, number
        self.weight = torch.nn.Parameter(
            torch.linspace(0.5, 1.5, 24, dtype=torch.float64) + number / 10
        )

    def forward(self, inputs):
        return Product.apply(inputs, self.weight, self)


def watched(gpu):
    """Patches that tell `gpu` of the memory and the work of stage 7: {(class, name):
    replacement}.
    """
    make_room, gather, free, collect, average = (
        BLOCK.make_room,
        BLOCK.gather,
        BLOCK.free,
        BLOCK.make_room_for_gradients,
        BLOCK.average,
    )

    def room(one):
        make_room(one)
        one.piece = gpu.whole[gpu.number_of[one]] = gpu.take("parameters")

    def gathered(one, group):
        gather(one, group)
        gpu.work(f"gather {gpu.number_of[one]}", GATHER, writes=[one.piece])

    def freed(one):
        free(one)
        if getattr(one, "piece", None):
            gpu.give(one.piece)
            one.piece = None

    def collected(one):
        collect(one)
        one.gradient_piece = piece = gpu.take("gradients")
        gpu.work("room", 0.0, writes=[piece])
        weakref.finalize(one.gradient, gpu.give, piece)

    def averaged(one, group=None):
        gpu.work(f"reduce {gpu.number_of[one]}", REDUCE, reads=[one.gradient_piece])
        return average(one, group)

    return {
        (BLOCK, "make_room"): room,
        (BLOCK, "gather"): gathered,
        (BLOCK, "free"): freed,
        (BLOCK, "make_room_for_gradients"): collected,
        (BLOCK, "average"): averaged,
    }


def room_in_the_thread(gpu):
    """The control: the memory is taken when the communication thread gets there, after a wait for
    an older moment.
    """

    def request(wrapper, block):
        if block.gathering is None:

            def job(group):
                block.make_room()
                block.gather(group)

            block.gathering = wrapper.start("gather", block, job)
        return block.gathering

    return {(WRAPPER, "request"): request}


def trained(on_gpu=True, side=True, control=None, steps=3):
    """Weights after `steps`; then the log of the last step, pieces of memory, collisions, the
    default stream's end.
    """
    gpu = VirtualGPU(lag=0.005)
    gpu.whole, gpu.number_of = {}, {}
    with ExitStack() as stack:
        if on_gpu:
            stack.enter_context(gpu.in_place_of_cuda())
        model = torch.nn.Sequential(*(Layer(gpu, number) for number in range(LAYERS)))
        parallel = FullyShardedDataParallel(
            model, process_group=dist.new_group()
        )  # with a thread of its own
        gpu.number_of.update({block: number for number, block in enumerate(parallel.blocks)})
        gpu.computing = Stream(gpu) if side else gpu.default
        for (kind, name), replacement in (watched(gpu) | (control(gpu) if control else {})).items():
            stack.enter_context(patch.object(kind, name, replacement))
        stack.enter_context(gpu.stream(gpu.computing))
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
        for _ in range(steps):
            gpu.log.clear()
            optimizer.zero_grad()
            inputs = torch.full((4, 24), 1.0 + dist.get_rank(), dtype=torch.float64)
            parallel(inputs).mean().backward()
            optimizer.step()
        log = list(gpu.log)
        state = torch.cat([value.reshape(-1) for value in parallel.state_dict().values()])
    return state, log, gpu.pieces, gpu.collisions, gpu.default.done


def spans(log, what):
    """(start, end) of all that is called so, in the order of time."""
    return sorted((begin, end) for name, begin, end in log if name == what)


def shared(one, other):
    """How long two spans lie under each other."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def hidden(log):
    """How much of the gathers of one step lies under the computation of other blocks."""
    computing = [
        (begin, end) for name, begin, end in log if name.startswith(("forward", "backward"))
    ]
    gathers = [(begin, end) for name, begin, end in log if name.startswith("gather")]
    return sum(shared(one, other) for one in gathers for other in computing)


def all_runs():
    """On a stream of its own, on the default stream, on the CPU; and with memory that is taken too
    late.
    """
    results = {"side": trained(), "default": trained(side=False), "cpu": trained(on_gpu=False)}
    return results | {"late": trained(control=room_in_the_thread)}


@pytest.fixture(scope="module")
def runs():
    """What rank 0 found."""
    return launch(all_runs, world_size=2, device="cpu")[0]


def test_the_weights_are_those_of_the_cpu_on_whatever_stream(runs):
    assert torch.equal(runs["side"][0], runs["cpu"][0]) and torch.equal(
        runs["default"][0], runs["cpu"][0]
    )
    assert runs["side"][4] == 0.0 < runs["default"][4], (
        "the default stream is left alone by who does not use it"
    )


def test_the_next_gather_runs_under_this_computation(runs):
    for _, log, *_ in (runs["side"], runs["default"]):
        assert hidden(log) >= GATHER * (
            2 * LAYERS - 3
        )  # all but the first of each pass, and one that was there
        for number in range(LAYERS):
            fetched, again = spans(log, f"gather {number}")
            assert fetched[1] <= spans(log, f"forward {number}")[0][0], (
                "computed before it was there"
            )
            assert again[1] <= spans(log, f"backward {number}")[0][0], (
                "computed before it was there"
            )


def test_two_blocks_at_most_are_whole_and_no_memory_is_given_away_too_early(runs):
    for _, log, pieces, collisions, _ in (runs["side"], runs["default"]):
        assert pieces == {"parameters": 2, "gradients": 2} and not collisions
        for number in range(2, LAYERS):  # the memory of the block before last
            assert spans(log, f"gather {number}")[0][0] >= spans(log, f"forward {number - 2}")[0][1]


def test_memory_that_is_taken_in_the_thread_collides(runs):
    assert runs["late"][3]
