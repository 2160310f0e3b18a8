"""What a loader gives to a training loop: one optimiser step at a time, as this rank's micro-batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What this rank computes in one forward and backward.

    ``samples`` is how many of them count. With 0 the batch is only there so that this rank takes part
    in what all ranks do together: its loss gets the weight 0.
    """

    batch: Any
    samples: int
    indices: Sequence[int] = ()  # of these samples in the dataset; empty where there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """This rank's part of one global batch: ``rounds`` micro-batches, as many on every rank.

    ``samples`` counts those of all ranks together; None where only the ranks together can tell.
    """

    epoch: int
    number: int  # within its epoch, from 0
    rounds: int
    samples: int | None
    nominal_samples: int  # the global batch size that was asked for
    micro_batches: Iterable[MicroBatch]  # may be read once, while the step is computed

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)


class Loader(Protocol):
    """Where steps come from. All ranks get the same number of steps."""

    def epoch(self, epoch: int, *, begin: int = 0) -> Iterator[Step]:
        """Yield the steps of an epoch, from step ``begin`` on.

        After :meth:`restore`, the epoch of the restored position goes on from there where no ``begin`` is given.
        """
        ...

    def steps_in_epoch(self) -> int | None:
        """Return how many steps an epoch has; None where that shows only at its end."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the position after the last step that was given out, as plain JSON types.

        ``epoch`` is always in it: the one to call :meth:`epoch` with after :meth:`restore`.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a position, also one saved by another number of ranks."""
        ...
