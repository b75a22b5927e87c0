"""Training scripts for torchrun, to be rehearsed: how they look is how people write them."""
