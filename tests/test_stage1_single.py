"""Stage 1 is gradient descent."""

import torch
from oracles import tiny_batches, tiny_model, weights

from ddp_course import stage1_single


def by_hand(model, batches, lr):
    """Gradient descent spelled out, with autograd's functional form and no optimizer."""
    losses = []
    for inputs, targets in batches:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= lr * gradient
        losses.append(loss.item())
    return losses


def test_training_is_gradient_descent():
    ours = tiny_model()
    theirs = tiny_model()
    losses = stage1_single.train(ours, tiny_batches(), 0.1)
    assert torch.allclose(
        torch.tensor(losses), torch.tensor(by_hand(theirs, tiny_batches(), 0.1)), rtol=0, atol=1e-14
    )
    assert (weights(ours) - weights(theirs)).abs().max() < 1e-15
    assert not torch.equal(weights(ours), weights(tiny_model()))
