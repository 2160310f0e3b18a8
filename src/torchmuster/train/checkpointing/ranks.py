"""Messages and errors among the ranks of a save or load, on a process group of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchmuster.errors import MusterError


class Ranks:
    """All ranks of the job; they call every method in the same order."""

    def __init__(self) -> None:
        # A save runs beside the training: on the training's group its messages could cross.
        self.group = dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def from_all(self, value: Any) -> list[Any]:
        """Return the values of all ranks on all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks; an error of any rank is raised on all, so that none waits for it.

        Inside the block the ranks must not communicate, unless all of them fail there together.
        """
        own: MusterError | None = None
        try:
            yield
        except MusterError as error:
            own = error
        except (Exception, CheckpointException) as error:
            own = MusterError("cannot read the checkpoints", why=cause_of(error, self.rank))
        errors = self.from_all(own)
        for error_of_rank in filter(None, [own, *errors]):
            raise error_of_rank


def cause_of(error: BaseException, rank: int) -> str:
    """Return the cause of a failed save or load, with the rank that it happened on."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return cause_of(cause, rank)
    if isinstance(error, MusterError):
        return f"rank {rank}: {error}"
    return f"rank {rank}: {type(error).__name__}: {error}"
