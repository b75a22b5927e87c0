"""Patient 3: it stops at the end of the first epoch.

torchrun --standalone --nproc-per-node=3 exercises/clinic/patient_03.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

from ddp_course import problems

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
digits = problems.make("digits")
data = TensorDataset(digits.inputs, digits.targets)
share = Subset(data, range(rank, 1436, 3))
loader = DataLoader(share, batch_size=64, shuffle=True)
model = digits.model()
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
    losses = cross_entropy(parallel(inputs), targets, reduction="none").detach()
    everywhere = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, losses)
    print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
