"""Where a stream's samples come from: a fixed number of lanes, each one read from front to back.

The number of lanes belongs to the data and not to the ranks: that is why the order of samples and a
saved position hold for any number of ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Cursor = Any  # plain JSON types; what they mean is the source's own business


class Lane(Protocol):
    """One lane being read."""

    def read(self, count: int) -> list[Any]:
        """Return the next samples: ``count`` of them, fewer only where the lane ends."""
        ...

    def cursor(self) -> Cursor:
        """Return the place of the next sample, from which the lane can be opened again."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


class Source(Protocol):
    """Samples in lanes, the same ones in the same order for the same seed and epoch."""

    def lanes(self) -> int:
        """Return how many lanes there are, whatever the number of ranks."""
        ...

    def open(
        self, lanes: Sequence[int], *, epoch: int, cursors: Mapping[int, Cursor | None]
    ) -> Mapping[int, Lane]:
        """Begin to read these lanes: from their beginning, or where a cursor points."""
        ...

    def identity(self) -> str:
        """Return a few words that are others for other data, so that a position cannot be mixed up."""
        ...
