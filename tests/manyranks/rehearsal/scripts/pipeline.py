"""A pipeline of two stages with torch's own schedule."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.manual_seed(rank)
stage_module = nn.Linear(64, 64).to("cuda")
stage = PipelineStage(stage_module, rank, dist.get_world_size(), torch.device("cuda"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(stage_module.parameters(), lr=0.1)
for _ in range(3):
    whole = torch.randn(32, 64)
    if rank == 0:
        schedule.step(whole)
    else:
        schedule.step(target=whole, losses=[])
    optimizer.step()
    optimizer.zero_grad()
