"""The norm of gradients that no rank has whole: torch's own function refuses. The random programs
compare ours.
"""

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model
from torch.nn.functional import cross_entropy

from ddp_course import launch
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer


def asked(way):
    """Return what asking for the norm of one rank's gradients gives, in several ways."""
    model = tiny_model()
    if way == "fully sharded":
        model = FullyShardedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    inputs, targets = next(tiny_batches(dist.get_rank(), dist.get_world_size()))
    (cross_entropy(model(inputs), targets) * 2.0**16).backward()
    gradient = next(p.grad for p in model.parameters() if p.grad is not None)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    questions = {
        "clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "clip foreach": lambda: torch.nn.utils.clip_grad_norm_(
            model.parameters(), 1.0, foreach=True
        ),
        "norm": lambda: gradient.norm(),
        "vector norm": lambda: torch.linalg.vector_norm(gradient),
        "foreach norm": lambda: torch._foreach_norm([gradient]),
        "scaler": lambda: scaler.unscale_(optimizer),
        "squares": lambda: gradient.square().sum(),
        "dot": lambda: gradient.flatten().dot(gradient.flatten()),
        "renorm": lambda: torch.renorm(gradient, 2, 0, 1.0),
        "after a product": lambda: (gradient * 2).norm(),
        "finite": lambda: torch.isfinite(gradient).all(),
        "end to end": lambda: torch.cat([gradient.view(-1), gradient.view(-1)]).norm(),
    }
    if way == "ZeRO-1":
        questions["values"] = lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        questions["signs"] = lambda: gradient.sign_()
    answers = {}
    for name, question in questions.items():
        try:
            answers[name] = question()
        except RuntimeError as error:
            answers[name] = str(error)
    harmless = [str(gradient), len(gradient), gradient.as_subclass(torch.Tensor).norm()]
    optimizer.step()
    return answers, len(harmless)


@pytest.mark.parametrize("way", ["ZeRO-1", "fully sharded"])
def test_nobody_takes_the_norm_of_a_part_for_that_of_the_whole(way):
    for answers, _ in launch(asked, way, world_size=2):
        refused = {
            name
            for name, answer in answers.items()
            if "To clip, call clip_grad_norm_" in str(answer)
        }
        assert refused == answers.keys() - {"scaler"}, answers
        assert "GradScaler looks for infinite gradients" in answers["scaler"]
