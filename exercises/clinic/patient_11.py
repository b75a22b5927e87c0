"""Patient 11: it trains on one device; with DDP it stops in the first backward pass, on every rank.

torchrun --standalone --nproc-per-node=3 exercises/clinic/patient_11.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_course import problems


class KeepsLess(torch.nn.Sequential):  # of each layer only what goes in, as the rest can be computed again
    def forward(self, inputs):
        inputs.requires_grad_()
        for layer in self:
            inputs = checkpoint(layer, inputs, use_reentrant=True)
        return inputs


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
digits = problems.make("digits")
data = TensorDataset(digits.inputs, digits.targets)
loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
parallel = DistributedDataParallel(KeepsLess(*digits.model()), find_unused_parameters=True)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
    print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
