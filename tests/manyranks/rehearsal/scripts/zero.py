"""An optimizer whose state is shared out over the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda())
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
for _ in range(3):
    model(torch.randn(8, 64).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
