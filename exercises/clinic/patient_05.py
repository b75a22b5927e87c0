"""Patient 5: it trains, and fails at the very end.

torchrun --standalone --nproc-per-node=3 exercises/clinic/patient_05.py
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
share = Subset(data, range(len(data) * rank // 3 - 40 * (rank == 2), len(data) * (rank + 1) // 3))
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
    print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
