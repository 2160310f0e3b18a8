"""Speed and memory of a published row by the formulas of ``benchmarks/published/models/decoder_memory.py`` and ``decoder_time.py``, with one constant for each stack."""

from functools import partial

import decoder_memory as beyond
from decoder_time import Shares, Time, step_time
from rows import Published, Row, fitted

from torchmuster.plan.timing.rates import CATALOGUED
from torchmuster.units import GiB

# What the allocator holds beyond tensors, by the two rows that were seen: 82.4 over 66.7 and 67.0 over 56.2.
RESERVED = 1.2
# Attention is not computed in float8: it goes at the speed of the same card's compiled bfloat16 stack.
_ATTENTION_FROM = {"h100 float8": "h100 compile"}


class Formulas:
    """Predictions for all rows; constants are found once."""

    def __init__(self, published: Published) -> None:
        self._published = published
        self._found: dict[str, float] = {}

    def constant(self, stack: str) -> float:
        """Return the share of the card's bfloat16 rate with which the stack's constant row comes out right."""
        if stack not in self._found:
            row = self._published.constant(stack)
            self._found[stack] = fitted(
                row, partial(self._tokens_per_s, row), low=0.01, high=3.0, within=1e-4
            )
        return self._found[stack]

    def tokens_per_s(self, row: Row) -> float:
        """Return what one card does."""
        return self._tokens_per_s(row, self.constant(row.stack))

    def time(self, row: Row, share: float) -> Time:
        """Return a step's parts."""
        from_stack = _ATTENTION_FROM.get(row.stack)
        shares = Shares(
            products=share,
            attention=share if from_stack is None else self.constant(from_stack),
            hides_tensor=row.async_tensor,
            gathered_bytes=1 if row.float8 else 2,
        )
        return step_time(
            row.decoder,
            row.spread,
            row.portion,
            hardware=self._published.hardware(row),
            shares=shares,
            rates=CATALOGUED,
        )

    def _tokens_per_s(self, row: Row, share: float) -> float:
        tokens = row.portion.batch * row.sequence_length * row.spread.data
        return tokens / self.time(row, share).step_s / row.spread.ranks


def reserved_gib(row: Row) -> float:
    """Return what the allocator holds."""
    return RESERVED * sum(beyond.memory(row.decoder, row.spread, row.portion).values()) / GiB
