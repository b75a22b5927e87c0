"""Train a transformer under torch's `fully_shard`, on random tokens: a script for torchrun.

    manyranks run --ranks 8 --device H100 --link NVLink --sizes-only 13_fsdp.py --layers 32

With --gated it is a Llama (RMSNorm, rotations, gates, fewer heads for keys and values), else a GPT.
With --zero1 what is sent is that of ZeRO-1: a rank keeps all weights and gradients during a step.
Recomputing stops at the last value that is needed; with --whole it does not, as before torch 2.1.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (
        ("layers", 12),
        ("hidden", 768),
        ("heads", 12),
        ("kv-heads", 0),
        ("ff", 0),
        ("vocab", 50_257),
        ("seq", 1024),
        ("micro-batch", 8),
        ("accumulate", 1),
        ("steps", 2),
        ("recompute-every", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--zero1", action="store_true", help="gather and average once a step")
    parser.add_argument("--whole", action="store_true", help="recompute all of a block")
    parser.add_argument("--pure", action="store_true", help="weights and optimizer in bfloat16")
    return parser.parse_args()


def rotated(values: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of halves of a head by its position's angles."""
    even, odd = values.float().chunk(2, dim=-1)
    cos, sin = angles
    turned = torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.type_as(values)


class Block(nn.Module):
    """Attention and an MLP, each after a norm and beside a residual."""

    def __init__(self, args):
        super().__init__()
        hidden = args.hidden
        ff = args.ff or 4 * hidden
        kv_heads = args.kv_heads or args.heads
        self.width = hidden // args.heads
        self.recomputed = False
        norm = nn.RMSNorm if args.gated else nn.LayerNorm
        self.attention_norm = norm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key_value = nn.Linear(hidden, 2 * kv_heads * self.width, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = norm(hidden)
        self.up = nn.Linear(hidden, ff, bias=False)
        self.gate = nn.Linear(hidden, ff, bias=False) if args.gated else None
        self.down = nn.Linear(ff, hidden, bias=False)

    def attend(self, values: Tensor, angles: Any) -> Tensor:
        """Return what each token finds in those before it."""
        batch, seq, hidden = values.shape
        query = self.query(values).view(batch, seq, -1, self.width).transpose(1, 2)
        key, value = self.key_value(values).view(batch, seq, -1, 2 * self.width).chunk(2, dim=-1)
        key = key.transpose(1, 2)
        value = value.transpose(1, 2)
        if angles is not None:
            query = rotated(query, angles)
            key = rotated(key, angles)
        times = query.shape[1] // key.shape[1]
        if times > 1:
            key = key.repeat_interleave(times, dim=1)
            value = value.repeat_interleave(times, dim=1)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, seq, hidden))

    def forward(self, values: Tensor, angles: Any) -> Tensor:
        """Return the values of the next block; what was computed may be forgotten meanwhile."""
        if self.recomputed:
            return checkpoint(self.compute, values, angles, use_reentrant=False)
        return self.compute(values, angles)

    def compute(self, values: Tensor, angles: Any) -> Tensor:
        """Return the values of the next block."""
        values = values + self.attend(self.attention_norm(values), angles)
        inner = self.mlp_norm(values)
        if self.gate is None:
            return values + self.down(functional.gelu(self.up(inner)))
        return values + self.down(functional.silu(self.gate(inner)) * self.up(inner))


class Transformer(nn.Module):
    """Words in, words out."""

    def __init__(self, args):
        super().__init__()
        self.words = nn.Embedding(args.vocab, args.hidden)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.hidden) if args.gated else nn.LayerNorm(args.hidden)
        self.output = nn.Linear(args.hidden, args.vocab, bias=False)

    def forward(self, tokens: Tensor, angles: Any) -> Tensor:
        """Return a score for each word, token by token."""
        values = self.words(tokens)
        for block in self.blocks:
            values = block(values, angles)
        return self.output(self.norm(values))


def sharded(args: argparse.Namespace, mesh: Any) -> nn.Module:
    """Return the model, each block sharded, and some of them recomputed in the backward pass."""
    with torch.device("meta"):
        model = Transformer(args)
    if args.pure:
        model.bfloat16()
    # InternEvo, whose ZeRO-1 this stands for, averages gradients in 16 bits.
    halved = args.pure or args.zero1
    reduce_dtype = torch.bfloat16 if halved else torch.float32
    reshard = False if args.zero1 else None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for number, block in enumerate(model.blocks):
        block.recomputed = args.recompute_every > 0 and number % args.recompute_every == 0
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    model.to_empty(device="cuda")
    for module in model.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return model


def rotations(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return the cosine and the sine by which each position turns each pair of a head."""
    pairs = args.hidden // args.heads // 2
    exponents = torch.linspace(0, 1, pairs, device="cuda")
    places = torch.arange(args.seq, device="cuda").float()
    turns = torch.outer(places, 10_000.0**-exponents)
    return turns.cos(), turns.sin()


def loss_of(model: nn.Module, args: argparse.Namespace, angles: Any) -> Tensor:
    """Return the loss of a micro-batch of random tokens."""
    shape = (args.micro_batch, args.seq + 1)
    tokens = torch.randint(args.vocab, shape, dtype=torch.int32, device="cuda")
    logits = model(tokens[:, :-1], angles)
    targets = tokens[:, 1:].long().flatten()
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets)


def compute_gradients(model: Any, args: argparse.Namespace, angles: Any) -> None:
    """Add up the gradients of a step's micro-batches."""
    for micro_batch in range(args.accumulate):
        if args.zero1:
            is_last = micro_batch == args.accumulate - 1
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
        loss_of(model, args, angles).backward()


def main() -> None:
    """Train for some steps."""
    args = parse()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model: Any = sharded(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=False)
    angles = rotations(args) if args.gated else None
    with set_checkpoint_early_stop(not args.whole):
        for _ in range(args.steps):
            compute_gradients(model, args, angles)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


main()
