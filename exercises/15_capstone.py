"""The template of the capstone: a training script for torchrun with your own model and data.

It writes what it did.

    torchrun --nproc-per-node=2 my_capstone.py runs/ddp --wrap ddp

Lesson 15 copies it to `my_capstone.py`. Change `make_model` and `make_batch` there; all else can
stay. It goes on from the checkpoint in the folder, and leaves `run.json` there: wrap, world size,
parameters, last loss, median step time, the step it resumed from, the devices, when it ran; and a
signature of all this, by which exercise 15 sees that nothing was changed afterwards.

With a GPU for each rank of this machine the ranks train there and talk through NCCL, else on the
processor.
"""

import argparse
import hashlib
import json
import os
import signal
import statistics
import time

from manyranks.joining.parent import end_with_torchrun

if __name__ == "__main__":
    end_with_torchrun()  # before torch is imported, which takes seconds

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_course import problems, rank_device
from manyranks.joining.join import join

# This is on rank 0, the same with every wrap and world size.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
# Every rank has read all of it, and takes what is its own.
SPREAD = StateDictOptions(full_state_dict=True)


def make_model() -> torch.nn.Module:
    """Your model: a GPT over bytes. Its weights must be the same on all ranks, hence the seed."""
    torch.manual_seed(0)
    return problems.ByteGPT(layers=4, width=128, context=64)


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Your data: inputs and targets of one rank in one step, the same ones when the step is run
    again.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    begin = torch.randint(200, (8, 1), generator=generator)
    text = (begin + torch.arange(65)) % 256  # each byte follows from the one before
    return text[:, :-1], text[:, 1:]


def wrapped(model: torch.nn.Module, wrap: str) -> torch.nn.Module:
    """Return the model as torch's DDP, sharded block by block, or as it is.

    As it is, every rank trains alone.
    """
    if wrap == "ddp":
        return DistributedDataParallel(model)
    if wrap == "fully_shard":
        # By itself it takes GPUs wherever torch was built for them, for ranks on the processor too.
        mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def save(folder: str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 writes a checkpoint, all of it or nothing; every rank calls this."""
    weights, state = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save({"step": step, "model": weights, "optimizer": state}, f"{folder}/new.pt")
        os.replace(f"{folder}/new.pt", f"{folder}/checkpoint.pt")


def resume(folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint of the folder, if there is one; return the step to go on with."""
    path = f"{folder}/checkpoint.pt"
    if not os.path.exists(path):
        return 0
    saved = torch.load(path, weights_only=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=SPREAD,
    )
    return saved["step"]


def device_kind() -> str:
    """Where all ranks of this machine can train: on a GPU each, or on the processor."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "cuda" if torch.cuda.device_count() >= ranks else "cpu"


def devices(ranks: int) -> str:
    """What so many ranks train on, in words."""
    if rank_device().type == "cuda":
        return f"{ranks} × {torch.cuda.get_device_name(rank_device())}"
    noun = "process" if ranks == 1 else "processes"
    return f"this machine's processor ({ranks} {noun})"


def signed(run: dict) -> dict:
    """The run with a signature: it belongs to these numbers and to no others."""
    text = json.dumps(run, sort_keys=True)
    return {**run, "signature": hashlib.sha256(text.encode()).hexdigest()[:16]}


def train(options: argparse.Namespace) -> None:
    """Train to the last step; rank 0 writes `run.json`."""
    began = time.time()
    model = wrapped(make_model().to(rank_device()), options.wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    resumed = resume(options.folder, model, optimizer)
    seconds = []
    for step in range(resumed, options.steps):
        inputs, targets = make_batch(step, dist.get_rank())
        start = time.perf_counter()
        inputs = inputs.to(rank_device())
        targets = targets.to(rank_device())
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        last_loss = loss.item()  # on a GPU this waits until the step is over
        seconds.append(time.perf_counter() - start)
        if (step + 1) % 10 == 0:
            save(options.folder, step + 1, model, optimizer)
        if step + 1 == options.kill_after and dist.get_rank() == 1 and resumed == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    slowest = [None] * dist.get_world_size()
    dist.all_gather_object(slowest, (statistics.median(seconds), last_loss))
    if dist.get_rank() == 0:
        times, losses = zip(*slowest, strict=True)
        run = {
            "wrap": options.wrap,
            "world_size": len(times),
            "resumed": resumed,
            "steps": options.steps,
            "parameters": sum(p.numel() for p in model.parameters()),
            "loss": statistics.fmean(losses),
            "step_s": max(times),
            "devices": devices(len(times)),
            "began": round(began),
            "took_s": round(time.time() - began, 1),
        }
        run = signed(run)
        with open(f"{options.folder}/run.json", "w") as file:
            json.dump(run, file)
        print(json.dumps(run), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--wrap", default="ddp", choices=("ddp", "fully_shard", "none"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--kill-after", type=int, help="rank 1 kills itself after this step, once: to try a resume"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: a GPU for each rank, else the processor"
    )
    arguments = parser.parse_args()
    os.makedirs(arguments.folder, exist_ok=True)
    join(arguments.device or device_kind())
    train(arguments)
    dist.destroy_process_group()
