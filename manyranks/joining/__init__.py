"""Joins the jobs of ranks that another launcher, torchrun or Slurm, has started."""
