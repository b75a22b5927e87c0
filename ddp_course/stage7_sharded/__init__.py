"""Stage 7: each rank keeps a shard, and asks the others for the rest when it needs the rest.

Training P float32 parameters with Adam takes 16 P bytes: 4 P of parameters, 4 P of gradients, 8 P
of Adam's two moments. Data parallelism keeps all of it on every rank. Lay the parameters end to end
and cut them into K chunks; after reduce-scatter, rank r owns chunk r+1 (stage 4), so let that chunk
be its shard:

                            a rank's bytes        traffic of a step, each rank sends
    stages 3 to 6           16 P                  2 (K-1)/K p  reduce-scatter + allgather of
                                                               gradients
    ShardedOptimizer        8 P + 8 P/K           2 (K-1)/K p  reduce-scatter of gradients,
                                                               allgather of parameters
    FullyShardedData…       16 P/K + two blocks   3 (K-1)/K p  allgather twice, reduce-scatter once

Fully sharded, block by block, with the next block's allgather under this block's compute:

    compute | forward 0 | forward 1 | forward 2 | backward 2 | backward 1 | backward 0 | update
    network | gather 1  | gather 2  | gather 2  | gather 1   | gather 0   | reduce 1   | reduce 0
                                                             | + reduce 2 |

In reading order: `parts`, `flat`, `clipping` and `optimizer` are ZeRO-1; `blocks` and `fsdp` go on
to ZeRO-3.

Sources: Rajbhandari et al., ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023.
"""

from torch.optim import SGD

from ..base.losses import cross_entropy
from .fsdp import FullyShardedDataParallel
from .optimizer import ShardedOptimizer

__all__ = ["FullyShardedDataParallel", "ShardedOptimizer", "train"]


def train(model, batches, lr, loss=cross_entropy, optimizer=SGD):
    """Train `model` in place on this rank's share of each batch; return its losses."""
    parallel = FullyShardedDataParallel(model)
    optimizer = optimizer(parallel.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        step_loss = loss(parallel(inputs), targets)
        step_loss.backward()
        optimizer.step()
        losses.append(step_loss.item())
    parallel.restore()
    return losses
