"""A script that prints its loss, and stops where that is not finite."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.randn(4, 8).cuda()).square().mean()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.1f}")
