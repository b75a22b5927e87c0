"""Patient 9: it does not even start.

torchrun --standalone --nproc-per-node=3 exercises/clinic/patient_09.py
"""

import os
import threading
from datetime import timedelta
from http.server import HTTPServer, SimpleHTTPRequestHandler

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_course import problems

rank = int(os.environ["RANK"])
if rank == 0:  # a page that shows how the run is doing
    threading.Thread(target=HTTPServer(("", 29561), SimpleHTTPRequestHandler).serve_forever, daemon=True).start()
store = dist.TCPStore("127.0.0.1", 29561, 3, rank == 0, timedelta(seconds=20))
dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=20), world_size=3, rank=rank)
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
