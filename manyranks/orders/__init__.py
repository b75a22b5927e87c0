"""Is a program of messages right in every order in which they may travel? One run says so.

`every` makes the run and says what it proves, `in_flight` watches the memory of messages under way
in each rank, and `verdict` has what came of it, in words and as a small timeline. The argument is
in docs/EVERY_ORDER.md.
"""
