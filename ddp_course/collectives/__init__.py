"""Other algorithms for an all-reduce.

Each sums a tensor over the ranks of a group in place, like `ring_all_reduce`, for any number of
ranks.

For p bytes over K ranks, links of bandwidth b and latency a, additions free:

    ring (stage 4)     2(K-1) a     + 2(K-1)/K p/b     least traffic; many steps
    tree               2 log2(K) a  + 2 log2(K) p/b    few steps, whole tensors: for small messages
    halving-doubling   2 log2(K) a  + 2(K-1)/K p/b     few steps and least traffic; wants a power of
                                                       two
    hierarchical       a ring inside each host of R ranks around a ring between the hosts: 1/R of
                       the bytes between hosts

Sources: Thakur, Rabenseifner and Gropp, Int. J. High Performance Computing Applications 19 (2005),
for tree and halving-doubling; Jia et al., arXiv:1807.11205 (2018), for the hierarchical one.
"""

from .halving_doubling import halving_doubling_all_reduce
from .hierarchical import hierarchical_all_reduce
from .tree import tree_all_reduce

__all__ = [
    "halving_doubling_all_reduce",
    "hierarchical_all_reduce",
    "tree_all_reduce",
]
