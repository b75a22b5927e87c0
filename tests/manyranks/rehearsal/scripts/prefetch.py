"""Layers that are recomputed, sharded inside groups of a mesh of two dimensions, and prefetched."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
shape = (1, dist.get_world_size())
mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(*(checkpoint_wrapper(nn.Linear(64, 64)) for _ in range(4))).cuda()
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
for layer, following in pairwise(model):
    layer.set_modules_to_forward_prefetch([following])
    following.set_modules_to_backward_prefetch([layer])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for _ in range(3):
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
