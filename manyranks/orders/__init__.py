"""Says from one run whether a program is right in every order in which its messages may travel.

`every` makes the run and says what it proves, `in_flight` watches the memory of messages under way
in each rank, and `verdict` has the result, in words and as a small timeline. The argument is in
docs/EVERY_ORDER.md.
"""
