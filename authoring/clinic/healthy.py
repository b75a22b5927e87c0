"""Healthy: it trains for three epochs.

torchrun --standalone --nproc-per-node=3 exercises/clinic/healthy.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_course import problems

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
digits = problems.make("digits")
data = TensorDataset(digits.inputs, digits.targets)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler)
model = digits.model()
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
    print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
