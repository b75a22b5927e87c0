"""Train with the course's stages on two pretended GPUs: `train_all.py [STAGE…]`.

Prints how far they end from one device.
"""

import sys

import torch
import torch.distributed as dist

from ddp_course import ladder, launch, problems
from ddp_course.stage6_ddp import DistributedDataParallel
from manyranks.devices import rank_device

VECTORS = {"parameters": 6 * 64**2, "width": 64}


def distances(keys):
    """On each rank: how far each stage ends from stage 1, trained on a stream of its own."""
    problem = problems.make("synthetic", dtype=torch.float64, device=rank_device(), **VECTORS)
    single = problem.model(0)
    found = {}
    ladder.find("1").trainer({})(single, problem.batches(24, 3, 0, 0, 1), 0.1)
    for key in keys:
        stage = ladder.find(key)
        model = problem.model(0)
        share = (dist.get_rank(), dist.get_world_size()) if stage.splits_batch else (0, 1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            train = stage.trainer({"bucket_cap_mb": 0.1})
            train(model, problem.batches(24, 3, 0, *share), 0.1)
        torch.cuda.current_stream().wait_stream(side)
        pairs = zip(model.parameters(), single.parameters(), strict=True)
        found[key] = max((one - other).abs().max().item() for one, other in pairs)
    found["hook"] = hooked()
    return found


def hooked():
    """Return how far a communication hook's average of two steps is from the backend's."""
    gradients = []
    for with_hook in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 6, device=rank_device(), dtype=torch.float64)
        parallel = DistributedDataParallel(model)
        if with_hook:
            parallel.register_comm_hook(None, mean)
        for step in range(2):
            inputs = torch.full((3, 6), 1.0 + step + dist.get_rank(), dtype=torch.float64)
            parallel(inputs.to(rank_device())).square().sum().backward()
        gradients.append(model.weight.grad)
    return (gradients[0] - gradients[1]).abs().max().item()


def mean(state, bucket):
    """Average a bucket, as a communication hook."""
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda future: future.value()[0] / dist.get_world_size())


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["3", "4", "5", "6", "7", "8", "9"]
    far = launch(distances, wanted, world_size=2)
    print(far)
    sys.exit(max(max(each.values()) for each in far) > 1e-10)
