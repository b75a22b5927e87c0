"""Patient 6: no error, but three ranks are slower than one.

torchrun --standalone --nproc-per-node=3 exercises/clinic/patient_06.py
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


class Augmented(TensorDataset):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        for _ in range(400 if rank == 2 else 8):
            image = image.roll(1, -1)  # 8 or 400 times: the same image
        return image, target


data = Augmented(digits.inputs, digits.targets)
loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
parallel = DistributedDataParallel(digits.model())
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
    print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
