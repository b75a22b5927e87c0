"""Cuts a model into stages of about equal size."""

from itertools import pairwise

import torch


def layers_of(model):
    """Return a model's modules, to run one after the other: a Sequential's, or its layers().

    Raises ValueError if it is no Sequential and has no layers().
    """
    if isinstance(model, torch.nn.Sequential):
        return list(model)
    if not callable(getattr(model, "layers", None)):
        raise ValueError(
            f"a pipeline needs a Sequential, or a model with layers(); {type(model).__name__} is"
            " neither"
        )
    return list(model.layers())


def count_parameters(layer):
    """Return how many numbers the parameters of a layer have."""
    return sum(parameter.numel() for parameter in layer.parameters())


def split(layers, stages):
    """Cut `layers` into `stages` Sequentials as evenly as can be, with parameters in all of them.

    The sum of the squared numbers of parameters is the least. Raises ValueError if too few layers
    have parameters, or if two stages would share a parameter or a buffer.
    """
    sizes = [count_parameters(layer) for layer in layers]
    # This is the cut of no layers into no stages; `with_one_stage_more` says what `best` holds.
    best = {0: (0, [])}
    for _ in range(stages):
        best = with_one_stage_more(best, sizes)
    if len(layers) not in best:
        most = sum(1 for size in sizes if size > 0)
        raise ValueError(
            f"{most} layers with parameters cannot be split over {stages} ranks; use at most "
            f"{most} ranks"
        )
    _, starts = best[len(layers)]
    cuts = [*starts, len(layers)]
    parts = [torch.nn.Sequential(*layers[start:end]) for start, end in pairwise(cuts)]
    tensors = []
    for part in parts:
        tensors += {*part.parameters(), *part.buffers()}
    if len(set(tensors)) < len(tensors):
        raise ValueError(
            "two stages would share a parameter or a buffer; a pipeline cannot keep it the same "
            "on both"
        )
    return parts


def with_one_stage_more(best, sizes):
    """Return the best cuts of the first 1, 2, … layers with one stage more than `best` has.

    Both are {number of layers: (sum of squared sizes, where each stage starts)}. Numbers of layers
    that cannot be cut into stages with parameters in all of them are left out.
    """
    longer = {}
    for end in range(1, len(sizes) + 1):
        choices = []
        for start, (squares, starts) in best.items():
            size = sum(sizes[start:end])
            if start < end and size > 0:
                choices.append((squares + size**2, [*starts, start]))
        if choices:
            # Of cuts with equal sums this takes the one with the earliest starts.
            longer[end] = min(choices)
    return longer
