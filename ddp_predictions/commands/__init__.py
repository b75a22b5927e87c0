"""The commands of this package that `ddp-course` runs, one file each."""
