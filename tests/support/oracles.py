"""What tests hold results against: inputs that differ on each rank, exact answers, and a bound.

The bound is on rounding: a sum of K numbers may be off by 2 (K-1) u times the sum of magnitudes,
where u is the unit roundoff. Source: Higham, "Accuracy and stability of numerical algorithms", 4.2.
"""

import torch

from ddp_course import collectives

# Every all-reduce of `collectives`, by its name without the end.
ALL_REDUCES = {
    name.removesuffix("_all_reduce"): getattr(collectives, name) for name in collectives.__all__
}
UNIT_ROUNDOFF = {
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
    torch.float32: 2**-24,
    torch.float64: 2**-53,
}


def rank_tensor(rank, shape, dtype=torch.float32, seed=0):
    """Return a tensor that is different on every rank, the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-1000, 1000, shape, generator=generator).to(dtype)


def assert_all_equal_sum(results, world_size, shape, dtype, seed=0):
    """Assert that every rank's result is the sum over the ranks' tensors, but for rounding."""
    inputs = torch.stack(
        [rank_tensor(rank, shape, dtype, seed).double() for rank in range(world_size)]
    )
    assert_close_to(results, inputs.sum(0), inputs.abs().sum(0), world_size, dtype)


def assert_all_equal_mean(results, world_size, shape, dtype, seed=0):
    """Assert that every rank's result is the mean over the ranks' tensors, but for rounding."""
    # The factor 1/K and the product with it are rounded, too: this counts as one rank more.
    inputs = torch.stack(
        [rank_tensor(rank, shape, dtype, seed).double() for rank in range(world_size)]
    )
    assert_close_to(results, inputs.mean(0), inputs.abs().mean(0), world_size + 1, dtype)


def assert_close_to(results, expected, magnitude, world_size, dtype):
    """Assert that each element is within 2 (K-1) u Σ|gᵢ|; integers must be exact."""
    bound = 2 * max(1, world_size - 1) * UNIT_ROUNDOFF.get(dtype, 0) * magnitude
    for rank, result in enumerate(results):
        error = (result.double() - expected).abs()
        assert result.dtype == dtype
        assert bool((error <= bound).all()), f"rank {rank} is off by {error.max().item():.3g}"


def tiny_model(seed=0, dtype=torch.float64):
    """Return a net with parameters of odd sizes, 1,043 in all: chunks and buckets are uneven."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [
            torch.nn.Linear(13, 37),
            torch.nn.Tanh(),
            torch.nn.Linear(37, 11),
            torch.nn.Tanh(),
        ]
        return torch.nn.Sequential(*layers, torch.nn.Linear(11, 9)).to(dtype)


def tiny_batches(rank=0, world_size=1, steps=4, batch=24, dtype=torch.float64):
    """Yield the share of `rank`: every K-th sample of the same global batches."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        inputs = torch.randn(batch, 13, generator=generator, dtype=torch.float64).to(dtype)
        targets = torch.randint(9, (batch,), generator=generator)
        yield inputs[rank::world_size], targets[rank::world_size]


def weights(model):
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def trained_alone(steps=4, dtype=torch.float64):
    """Return the weights after stage 1 on the whole batches: what every strategy must arrive at."""
    from ddp_course import stage1_single

    model = tiny_model(dtype=dtype)
    stage1_single.train(model, tiny_batches(steps=steps, dtype=dtype), 0.1)
    return weights(model)
