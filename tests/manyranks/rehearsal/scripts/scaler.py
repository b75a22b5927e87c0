"""Half precision with a scaled loss, a scheduler, and an epoch's mean loss added up over ranks."""

import torch
import torch.distributed as dist
from torch import nn

from manyranks.joining.join import join

rank, world_size = join()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
scaler = torch.amp.GradScaler("cuda")
total = torch.zeros((), device="cuda")
for _ in range(3):
    with torch.autocast("cuda"):
        loss = model(torch.randn(16, 64, device="cuda")).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
    total += loss.detach()
dist.all_reduce(total)
