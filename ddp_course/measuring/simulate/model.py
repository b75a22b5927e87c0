"""What the simulator needs to know of a model: how long each layer takes, and how many bytes of gradient it has."""

import copy
from math import isfinite
from statistics import median
from time import perf_counter, sleep
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy


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
    def gradient_bytes(self):
        """Bytes of all gradients together."""
        return sum(layer.gradient_bytes for layer in self.layers)

    @property
    def compute_s(self):
        """Seconds of a step on one device, without communication."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers) + self.update_s

    def scaled(self, factor):
        """The same model on a device that needs `factor` times as long."""
        layers = (Layer(n, forward * factor, backward * factor, size) for n, forward, backward, size in self.layers)
        return Profile(tuple(layers), self.update_s * factor)


def checked(profile):
    """Return `profile`; ValueError if it has no gradients, or times or sizes that cannot be."""
    for name, *numbers in profile.layers:
        if not all(isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f'layer "{name}": times are in seconds, gradients in bytes, 0 or more; got {numbers}')
    if not (isfinite(profile.update_s) and profile.update_s >= 0):
        raise ValueError(f"the update takes {profile.update_s} seconds; it must be 0 or more")
    if not profile.gradient_bytes:
        raise ValueError("the profile has no gradients: nothing would be sent")
    return profile


def assign_buckets(profile, bucket_cap_mb=25.0, first_bucket_mb=None):
    """Group the layers, last first, into buckets closed on reaching `bucket_cap_mb` MiB; returns lists of indices.

    The first bucket closes at `first_bucket_mb`; when None, at 1 MiB if the cap is torch's default of 25, else at
    the cap: as stage 5 and torch's DDP do. ValueError for a cap that is not positive.
    """
    if not bucket_cap_mb > 0:
        raise ValueError(f"the bucket cap is {bucket_cap_mb} MiB; it must be more than 0")
    if first_bucket_mb is None:
        first_bucket_mb = 1.0 if bucket_cap_mb == 25.0 else bucket_cap_mb
    buckets, filling, size = [], [], 0.0
    for index in reversed(range(len(profile.layers))):
        if not profile.layers[index].gradient_bytes:
            continue
        filling.append(index)
        size += profile.layers[index].gradient_bytes
        if size >= (bucket_cap_mb if buckets else first_bucket_mb) * 2**20:
            buckets.append(filling)
            filling, size = [], 0.0
    return [*buckets, filling] if filling else buckets


def profile(model, inputs, targets, loss=cross_entropy, repeats=5, warmup=2, pause_s=0.0):
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
    for parameter in sorted(names, key=ready.get):
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
