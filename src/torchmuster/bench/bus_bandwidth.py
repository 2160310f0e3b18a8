"""The bandwidths of messages between ranks, in the words and factors of nccl-tests.

Algorithm bandwidth is the size of a message over its time. Bus bandwidth is that times a factor by which it becomes what the
narrowest link carries, whatever the number of ranks: it can be held against the hardware. Sizes and factors are those of
nccl-tests' PERFORMANCE.md.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One kind of message: what its size means, and the factor of its bus bandwidth."""

    size: str
    bus_factor: Callable[[int], float]


OPERATIONS: dict[str, Operation] = {
    "all-reduce": Operation(
        size="each rank's buffer", bus_factor=lambda ranks: 2 * (ranks - 1) / ranks
    ),
    "all-gather": Operation(
        size="the result, all ranks' parts", bus_factor=lambda ranks: (ranks - 1) / ranks
    ),
    "reduce-scatter": Operation(
        size="each rank's input", bus_factor=lambda ranks: (ranks - 1) / ranks
    ),
    "all-to-all": Operation(
        size="each rank's buffer",
        bus_factor=lambda ranks: (ranks - 1) / ranks,
    ),
    "send-receive": Operation(
        size="what each rank sends to the next",
        bus_factor=lambda _: 1.0,
    ),
}


def algorithm_bytes_s(size_bytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth: what one who waits for the message sees."""
    return size_bytes / seconds


def bus_bytes_s(operation: str, size_bytes: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth: what the narrowest link carries."""
    return algorithm_bytes_s(size_bytes, seconds) * OPERATIONS[operation].bus_factor(ranks)
