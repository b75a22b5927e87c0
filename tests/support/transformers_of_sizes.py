"""A GPT of plain blocks for rehearsals, and the seconds of its step from a recurrence.

The recurrence is that of torch's `fully_shard`, and knows nothing of clocks.
"""

from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and an MLP of four times the width, without biases."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        split = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        attended = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Words in, blocks, words out."""

    def __init__(self, width, heads, layers, vocabulary):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Costs:
    """Seconds of the parts of a step of a `GPT` in bfloat16.

    They are `forward` and `backward` of a block, of the `head`, and a gather (or a scatter) of a
    `block` and of the `root`.
    """

    def __init__(self, ranks, width, vocabulary, batch, seq, flops, bits):
        tokens = batch * seq
        self.forward = (24 * tokens * width**2 + 4 * batch * seq**2 * width) / flops
        self.backward = (48 * tokens * width**2 + 10 * batch * seq**2 * width) / flops
        self.head = 2 * tokens * width * vocabulary / flops

        def sent(rows):
            """Return the seconds of the rows that each rank sends, of `width` columns."""
            return (ranks - 1) * 8 * 2 * sum(-(-count // ranks) for count in rows) * width / bits

        one = [3 * width, width, 4 * width] + [width] * 4  # "down" has four columns for each.
        norm = (ranks - 1) * 8 * 2 * -(-width // ranks) / bits
        self.block = sent(one) + 2 * norm
        self.root = sent([vocabulary, vocabulary]) + norm


def step_of_fully_shard(costs, layers, reshard=True):
    """Return the seconds of a step with one stream to compute, one to gather and one to scatter.

    The wire carries one thing after the other.
    """
    device = gather = scatter = wire = 0.0

    def gathered(seconds):
        nonlocal gather, wire
        gather = wire = max(gather, wire) + seconds
        return gather

    device = before = gathered(costs.root)
    for _ in range(layers):
        arrived = gathered(costs.block)
        gather = max(gather, before)
        device = before = max(device, arrived)
        device += costs.forward
    gather = max(gather, before)
    device += costs.head
    following = gathered(costs.block) if reshard else 0.0
    device += 2 * costs.head
    reduced = 0.0
    for layer in reversed(range(layers)):
        if reshard:
            device = max(device, following)
            gather = max(gather, device)
            if layer:
                following = gathered(costs.block)
        device = max(device + costs.backward, reduced)
        scatter = wire = reduced = max(scatter, device, wire) + costs.block
    device = max(device, reduced)
    return max(scatter, device, wire) + costs.root
