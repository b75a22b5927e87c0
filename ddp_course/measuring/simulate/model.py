"""What the simulator needs to know of a model: how long each layer takes, and how many bytes of gradient it has."""

import copy
from collections.abc import Callable
from math import isfinite
from statistics import median
from time import perf_counter, sleep
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ... import stage5_bucketed


class Layer(NamedTuple):
    """One layer or parameter: seconds of its forward and backward pass, bytes of its gradient."""

    name: str
    forward_s: float
    backward_s: float
    gradient_bytes: float


class Profile(NamedTuple):
    """`layers` in forward order (backward runs through them in reverse) and the seconds of the optimizer's update."""

    layers: tuple[Layer, ...]
    update_s: float = 0.0

    @property
    def gradient_bytes(self) -> float:
        """Bytes of all gradients together."""
        return sum(layer.gradient_bytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Seconds of a step on one device, without communication."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers) + self.update_s

    def scaled(self, factor: float) -> "Profile":
        """The same model on a device that needs `factor` times as long."""
        layers = (Layer(n, forward * factor, backward * factor, size) for n, forward, backward, size in self.layers)
        return Profile(tuple(layers), self.update_s * factor)


def checked(profile: Profile) -> Profile:
    """Return `profile`; ValueError if it has no gradients, or times or sizes that cannot be."""
    for name, *numbers in profile.layers:
        if not all(isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f'layer "{name}": times are in seconds, gradients in bytes, 0 or more; got {numbers}')
    if not (isfinite(profile.update_s) and profile.update_s >= 0):
        raise ValueError(f"the update takes {profile.update_s} seconds; it must be 0 or more")
    if not profile.gradient_bytes:
        raise ValueError("the profile has no gradients: nothing would be sent")
    return profile


def assign_buckets(profile: Profile, bucket_cap_mb: float = 25.0) -> list[list[int]]:
    """Stage 5's `assign_buckets` for the gradients of `profile`'s layers; returns lists of their indices."""
    places, gradients = {}, []
    for index, layer in enumerate(profile.layers):
        if layer.gradient_bytes:
            gradients.append(torch.empty(round(layer.gradient_bytes), dtype=torch.uint8, device="meta"))
            places[id(gradients[-1])] = index
    buckets = stage5_bucketed.assign_buckets(gradients, bucket_cap_mb)
    return [[places[id(gradient)] for gradient in bucket] for bucket in buckets]


def profile(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss: Callable[..., torch.Tensor] = cross_entropy,
    repeats: int = 5,
    warmup: int = 2,
    pause_s: float = 0.0,
) -> Profile:
    """Measure a real model on this device: a `Profile` with a `Layer` for each trainable parameter.

    A copy of `model` runs `warmup + repeats` steps on the batch (`inputs`, `targets`); medians count. `model` itself,
    its gradients and the random state stay as they are. A parameter's backward time runs from the gradient before
    it to its own; forward times count for the first parameter of a module. `pause_s` seconds of rest before each
    step are what a rank has that waits for others: caches cool down. ValueError if nothing is trainable.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"{repeats} repeats after {warmup} warm-ups: measure at least once")
    replica = copy.deepcopy(model)
    names = {parameter: name for name, parameter in replica.named_parameters() if parameter.requires_grad}
    if not names:
        raise ValueError("the model has no trainable parameters: nothing would be sent")
    optimizer = torch.optim.SGD(names, lr=0.0)
    devices = [inputs.device] if inputs.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        runs = []
        for _ in range(warmup + repeats):
            sleep(pause_s)
            runs.append(_timed_step(replica, optimizer, names, inputs, targets, loss))
    runs = runs[warmup:]
    ready = {p: median(run[1].get(p, 0.0) for run in runs) for p in names}
    forward = {p: median(run[0].get(p, 0.0) for run in runs) for p in names}
    layers, before = [], 0.0
    for parameter in sorted(names, key=ready.__getitem__):
        size = parameter.numel() * parameter.element_size()
        layers.append(Layer(names[parameter], forward[parameter], ready[parameter] - before, size))
        before = ready[parameter]
    return Profile(tuple(reversed(layers)), median(run[2] for run in runs))


def _timed_step(model, optimizer, names, inputs, targets, loss):
    """One step; returns (forward seconds by parameter, gradient's time from the start of backward, update seconds)."""
    forward, ready, mark, begun = {}, {}, [_now(inputs)], [0.0]

    def module_done(module, *_):
        own = [p for p in module.parameters(recurse=False) if p in names]
        if own:
            now = _now(inputs)
            forward[own[0]] = forward.get(own[0], 0.0) + now - mark[0]
            mark[0] = now

    hooks = [module.register_forward_hook(module_done) for module in model.modules()]
    hooks += [p.register_post_accumulate_grad_hook(lambda p: ready.update({p: _now(inputs) - begun[0]})) for p in names]
    try:
        mark[0] = _now(inputs)
        value = loss(model(inputs), targets)
        rest = _now(inputs) - mark[0]
        last = list(forward)[-1] if forward else next(iter(names))
        forward[last] = forward.get(last, 0.0) + rest
        begun[0] = _now(inputs)
        value.backward()
        start = _now(inputs)
        optimizer.step()
        update = _now(inputs) - start
        optimizer.zero_grad()
    finally:
        for hook in hooks:
            hook.remove()
    return forward, ready, update


def _now(tensor):
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return perf_counter()
