"""Commands of this package: what `ddp-course` runs, one file each."""
