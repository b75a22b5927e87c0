"""A training script for torchrun, as short as it can be, to copy for your own model and data.

    torchrun --nproc-per-node=2 -m ddp_course.script runs/first         with torch's DDP
    torchrun --nproc-per-node=2 -m ddp_course.script runs/first ours    with this course's own

`ddp_course.train` is its grown-up sister: exact resume, every stage, Slurm, errors that name the
rank.
"""

import os
import sys

from manyranks.joining.parent import end_with_torchrun

if __name__ == "__main__":
    end_with_torchrun()  # before torch is imported, which takes seconds

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_course import problems, stage6_ddp


def main(folder: str, wrap: type = DistributedDataParallel, epochs: int = 3) -> torch.nn.Module:
    """Train on this rank's share; rank 0 leaves a checkpoint in `folder`.

    Each rank has its own GPU if there is one for each rank of this machine.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        # What is exchanged beside tensors goes by way of the current device.
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    digits = problems.make("digits")
    data = TensorDataset(digits.inputs, digits.targets)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = digits.model().to(device)
    parallel = wrap(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(parallel(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
            torch.save(
                {"epoch": epoch, "model": model.state_dict()}, os.path.join(folder, "checkpoint.pt")
            )
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    main(
        sys.argv[1],
        stage6_ddp.DistributedDataParallel if "ours" in sys.argv else DistributedDataParallel,
    )
