"""Stage 1: one device. Forward, backward, update: everything later only adds to the middle."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD


def train(model, batches, lr):
    """Train `model` in place on an iterable of (inputs, targets); return the loss of every step."""
    optimizer = SGD(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
