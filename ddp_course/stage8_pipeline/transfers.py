"""Transfers: activations and gradients on their way between ranks, in one step."""

from collections import deque

import torch
import torch.distributed as dist

from .. import wire
from .instructions import Result
from .timetable import given

# Forms travel over gloo, as NCCL would need another communicator for them.
CPU = torch.device("cpu")


class Transfers:
    """What this rank sends and receives in one step, and what it keeps for its own stages.

    `schedule` has the instructions of all ranks, and `homes` maps each stage to its rank. `inputs`
    are those of each micro-batch. `forms` maps each cut to the form, (dtype, shape), of a sample
    there: it is filled in the first step, and given again in later steps with batches of this kind.
    """

    def __init__(self, schedule, homes, group, inputs, forms):
        self.homes = homes
        self.group = group
        self.rank = dist.get_rank(group)
        self.inputs = inputs

        self.forms = forms
        self.own_results = {}  # the tensors of results that pass between two stages of this rank
        self.arriving = {}  # the transfers of results that have begun to come here
        self.leaving = {}  # the transfers of results that have begun to leave
        # Each rank will still send these results here, beside those in `arriving`.
        self.expected = [self.sent_here(instructions) for instructions in schedule]
        if wire.on_nccl(inputs[0], group):
            self.connect()
        for rank in range(len(schedule)):
            if rank != self.rank:
                self.post_next(rank)

    def connect(self):
        """Make this rank's groups of two before the first message.

        To make a group both ranks wait for each other, so all go through them in one order, and no
        receive may be under way.
        """
        for rank, results in enumerate(self.expected):
            if results and rank != self.rank:
                first, second = sorted([rank, self.rank])
                self.channel(first, second)
                # Gradients go back where activations come from.
                self.channel(second, first)

    def sent_here(self, instructions):
        """Return the results of a rank's instructions that this rank needs, in sending order."""
        results = [given(instruction, self.homes) for instruction in instructions]
        return deque(each for each in results if each and self.homes[each.user] == self.rank)

    def receive(self, result):
        """Return the tensor of `result`, from this rank or another; None if none computes it."""
        rank = self.homes.get(result.source, self.rank)
        if rank == self.rank:
            return self.own_results.pop(result, None)
        while result not in self.arriving:
            self.post_receive(rank)
        transfer = self.arriving.pop(result)
        self.post_next(rank)
        with wire.span("wait"):
            transfer.wait()
        sent = self.leaving.pop(Result(result.microbatch, result.user, result.source), None)
        # The gradient of what was sent has arrived, so that has arrived, too.
        if sent is not None:
            sent.wait()
        return transfer.tensor

    def post_next(self, rank):
        """Begin to receive the next message from `rank` early, if its form is known."""
        if self.expected[rank] and self.expected[rank][0].cut in self.forms:
            self.post_receive(rank)

    def post_receive(self, rank):
        """Begin to receive the next message from `rank`; before the first over a cut, its form."""
        result = self.expected[rank].popleft()
        peer, group = self.channel(rank, self.rank)
        if result.cut not in self.forms:
            received = [None]
            dist.recv_object_list(received, peer, group, device=CPU)
            self.forms[result.cut] = received[0]
        dtype, shape = self.forms[result.cut]
        samples = len(self.inputs[result.microbatch])
        room = torch.empty(samples, *shape, dtype=dtype, device=self.inputs[0].device)
        self.arriving[result] = wire.irecv(room, peer, group)

    def announce(self, outputs, stage):
        """Tell the next rank the dtype and shape of activations before the first over a cut.

        Raises ValueError for outputs that cannot be passed on.
        """
        # This form is only for the error's words.
        form = (type(outputs).__name__,)
        sendable = False
        if isinstance(outputs, torch.Tensor):
            form = (outputs.dtype, outputs.shape[1:])
            sendable = outputs.is_floating_point()
        if not sendable or form != self.forms.get(stage, form):
            raise ValueError(
                f"stage {stage} on rank {self.rank} returns {form}, but only one tensor of "
                "floating-point numbers can be passed on, of the same dtype and shape for each "
                "micro-batch: cut the model elsewhere"
            )
        rank = self.homes[stage + 1]
        if stage not in self.forms and rank != self.rank:
            peer, group = self.channel(self.rank, rank)
            dist.send_object_list([form], peer, group, device=CPU)
        self.forms[stage] = form

    def send(self, result, tensor):
        """Give a result's `tensor` to the instruction that needs it, here or on another rank."""
        rank = self.homes[result.user]
        if rank == self.rank:
            self.own_results[result] = tensor
        else:
            self.leaving[result] = wire.isend(tensor, *self.channel(self.rank, rank))

    def finish(self):
        """Wait until all messages have left."""
        for transfer in self.leaving.values():
            transfer.wait()

    def channel(self, sender, receiver):
        """Return the other rank's global number, and the group for messages to `receiver`.

        One of `sender` and `receiver` is this rank. NCCL works through a group's messages one after
        the other, so a message for which a rank waits would hold up all others. So with NCCL two
        ranks have a group of their own for each direction.
        """
        other = wire.global_rank(receiver if sender == self.rank else sender, self.group)
        if not wire.on_nccl(self.inputs[0], self.group):
            return other, self.group
        pair = wire.group_of(self.group, (sender, receiver))
        wire.warm_up(self.inputs[0], pair)
        return other, pair
