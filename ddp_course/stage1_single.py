"""Stage 1: one device. Forward, backward, update: everything later only adds to the middle."""

from torch.optim import SGD

from .base.losses import cross_entropy


def train(model, batches, lr, loss=cross_entropy, optimizer=SGD):
    """Train `model` in place on an iterable of (inputs, targets); return the loss of every step."""
    optimizer = optimizer(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        optimizer.step()
        losses.append(step_loss.item())
    return losses
