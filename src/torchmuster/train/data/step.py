"""The items that a loader yields: one optimizer step at a time, as this rank's micro-batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The batch of this rank in one forward and backward.

    ``samples`` is the number of samples that count. With 0 the batch only lets this rank take part
    in collectives: its loss gets the weight 0.
    """

    batch: Any
    samples: int
    indices: Sequence[int] = ()  # of these samples in the dataset; empty if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """This rank's part of one global batch: ``rounds`` micro-batches, equal on every rank.

    ``samples`` is the count over all ranks; None if a collective is needed to know it.
    """

    epoch: int
    number: int  # within its epoch, from 0
    rounds: int
    samples: int | None
    nominal_samples: int  # the configured global batch size
    micro_batches: Iterable[MicroBatch]  # may be read once, while the step is computed

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)


class Loader(Protocol):
    """A source of steps. All ranks get the same number of steps."""

    def epoch(self, epoch: int) -> Iterator[Step]:
        """Yield the steps of an epoch; after :meth:`restore`, those after the restored position."""
        ...

    def steps_in_epoch(self) -> int | None:
        """Return how many steps an epoch has; None if that is known only at its end."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the position after the last yielded step, as plain JSON types.

        It always has ``epoch``: the argument for :meth:`epoch` after :meth:`restore`.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after a saved position."""
        ...
