"""Patient 10: no error; the second run goes on from the first one's checkpoint and ends with three different models.

torchrun --standalone --nproc-per-node=3 exercises/clinic/patient_10.py
"""

import os
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
if rank == 0 and os.path.exists("clinic.pt"):
    model.load_state_dict(torch.load("clinic.pt"))
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
    print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}", flush=True)
if rank == 0:
    torch.save(model.state_dict(), "clinic.pt")
print(f"rank {rank}: weights {sum(p.double().sum().item() for p in model.parameters()):.6f}", flush=True)
dist.destroy_process_group()
