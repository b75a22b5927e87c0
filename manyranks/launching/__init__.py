"""Launches: the processes that run a function on K ranks, and what they say to each other."""
