"""Patient 4: the first epoch ends, and then nothing goes on.

torchrun --standalone --nproc-per-node=3 exercises/clinic/patient_04.py
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
    if rank == 0:
        right = (parallel(digits.test_inputs[rank::3]).argmax(1) == digits.test_targets[rank::3]).sum()
        dist.all_reduce(right)
        print(f"epoch {epoch}: {right.item()} test images are right", flush=True)
dist.destroy_process_group()
