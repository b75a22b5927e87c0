"""Layers divided over half of a mesh, with sequences divided between them, and sharded over the
other half.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, values):
        return values + self.down(self.up(self.norm(values)).relu())


dist.init_process_group("nccl")
parts = 2
mesh = init_device_mesh(
    "cuda", (dist.get_world_size() // parts, parts), mesh_dim_names=("shards", "parts")
)
torch.manual_seed(0)
model = nn.Sequential(*(Block(64) for _ in range(2))).cuda()
plan = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
for block in model:
    parallelize_module(block, mesh["parts"], plan)
    fully_shard(block, mesh=mesh["shards"])
fully_shard(model, mesh=mesh["shards"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
for _ in range(3):
    own_part = torch.randn(4, 32 // parts, 64, device="cuda")
    model(own_part).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
