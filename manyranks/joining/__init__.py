"""Ranks that another launcher has started: torchrun and Slurm."""
