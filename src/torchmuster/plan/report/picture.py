"""What fills a card's memory at the peak: the parts without their looks, for the terminal and for the page."""

from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.plan.answer import Forecast
from torchmuster.plan.asked import Asked
from torchmuster.plan.record import CATEGORIES


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a card's memory."""

    name: str
    size_bytes: int
    source: str


def parts(one: Forecast) -> list[Part]:
    """Return what is in a card's memory, the largest kind of thing first: tensors, then what surrounds them."""
    return [part for part in _parts(one) if part.size_bytes > 0]


def _parts(one: Forecast) -> Iterator[Part]:
    memory = one.memory
    for category in CATEGORIES:
        yield Part(
            name=category, size_bytes=memory.by_category.get(category, 0), source="traced tensors"
        )
    outside = sum(term.size_bytes for term in memory.outside)
    kept = memory.total_bytes - memory.tensor_bytes - outside
    source = "simulated" if memory.reserved_bytes is not None else "a usual share"
    yield Part(name="kept by the allocator", size_bytes=kept, source=source)
    for term in memory.outside:
        yield Part(name=term.name, size_bytes=term.size_bytes, source=term.source)


def spare(one: Forecast, asked: Asked) -> int:
    """Return what is left of a card above the middle of the band; negative: so much is missing."""
    return asked.hardware.card.memory_bytes - one.memory.total_bytes


def place(one: Forecast) -> str:
    """Say where in a step the peak is."""
    peak = one.memory.where
    if peak is None:
        return "by a formula"
    where = f", block {peak.block}" if peak.block is not None else ""
    what = f", {peak.operation}" if peak.operation else ""
    return f"in the {peak.phase}{where}{what}"
