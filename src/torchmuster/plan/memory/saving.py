"""What saving takes: copies in the host's memory while a checkpoint is written, and room on the disk.

The same counts as in ``train/checkpointing``: a checkpoint has every parameter and the optimiser's states once, ranks divide
evenly what they write, and saving beside the training keeps a copy of what a machine's ranks write.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory.shard_degree import with_times
from torchmuster.plan.record import Shape

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}
OPTIMIZER_COPIES = {"adamw": 2, "sgd": 1}  # of each trained parameter: two averages; a momentum


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Bytes of one save."""

    checkpoint_bytes: int  # on the disk
    host_bytes: int  # of one machine, while saving goes on beside the training


def saving(
    shapes: Sequence[Shape],
    work: Work,
    candidate: Candidate,
    *,
    blocks: int,
    ranks_per_machine: int,
) -> Saving:
    """Return what a save of a model of so many blocks takes."""
    whole = 0
    for shape, times in with_times(shapes, blocks):
        copies = 1 + (OPTIMIZER_COPIES[work.optimizer] if shape.trained else 0)
        whole += copies * times * math.prod(shape.shape) * ITEM_BYTES.get(shape.dtype, 1)
    here = min(ranks_per_machine, candidate.layout.ranks)
    return Saving(checkpoint_bytes=whole, host_bytes=whole * here // candidate.layout.ranks)
