"""A sharded model that is saved and loaded: whole by rank 0, and by each rank its own part."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
folder = sys.argv[1]
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/parts")
dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/parts")
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
whole = get_model_state_dict(
    model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
)
if dist.get_rank() == 0:
    torch.save({"step": 3, "model": whole}, f"{folder}/whole.pt")
    read = torch.load(f"{folder}/whole.pt", weights_only=True)
    assert read["step"] == 3
    assert read["model"]["0.weight"].shape == (64, 64)
