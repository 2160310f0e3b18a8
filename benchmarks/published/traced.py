"""Memory and speed of a published row as ``muster plan`` forecasts them: from traces."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rows import Published, Row, fitted

from torchmuster.errors import MusterError
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.timing import forecast as timing
from torchmuster.plan.timing.rates import CATALOGUED, Rates
from torchmuster.plan.tracing.cache import TraceCache
from torchmuster.plan.tracing.tracer import Tracer, TraceRefused
from torchmuster.units import GiB


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What the product says of a row."""

    tensor_gib: float
    reserved_gib: float | None
    origin: str


class Traced:
    """Forecasts for the rows that the product itself could train; constants of stacks are found once."""

    def __init__(
        self, published: Published, tracer: Tracer, *, only_kept: TraceCache | None = None
    ) -> None:
        """Prepare. With ``only_kept`` nothing new is traced: rows without kept traces are not known here."""
        self._published = published
        self._tracer = tracer
        self._only_kept = only_kept
        self._records: dict[tuple[TraceRequest, ...], list[TraceRecord]] = {}
        self._found: dict[str, float] = {}

    def memory(self, row: Row) -> Forecast:
        """Return what a rank needs."""
        found = memory.predict_memory(
            self._records_for(_few_blocks(row)),
            row.candidate,
            hardware=self._published.hardware(row),
            allocator=row.allocator,  # type: ignore[arg-type]
        )
        reserved = found.reserved_bytes
        return Forecast(
            tensor_gib=found.tensor_bytes / GiB,
            reserved_gib=None if reserved is None else reserved / GiB,
            origin=found.origin,
        )

    def tokens_per_s(self, row: Row, factor: float = 1.0) -> float:
        """Return what one card does; ``factor`` multiplies the usual shares of its rates."""
        rates: Rates = replace(
            CATALOGUED, compute=factor * CATALOGUED.compute, memory=factor * CATALOGUED.memory
        )
        found = timing.predict_time(
            self._records_for(_few_blocks(row, for_speed=True)),
            row.candidate,
            hardware=self._published.hardware(row),
            rates=rates,
        )
        assert found.tokens_per_s is not None
        return found.tokens_per_s / row.spread.ranks

    def constant(self, stack: str) -> float:
        """Return the factor with which the stack's constant row comes out right."""
        if stack not in self._found:
            row = self._published.constant(stack)
            self._found[stack] = fitted(
                row, partial(self.tokens_per_s, row), low=0.05, high=4.0, within=1e-3
            )
        return self._found[stack]

    def knows_memory(self, row: Row) -> bool:
        """Say whether a row's memory can be told."""
        return row.is_plain and self._are_kept(_few_blocks(row))

    def knows_speed(self, row: Row) -> bool:
        """Say whether a row's speed can be told."""
        if not row.is_plain or row.float8:
            return False
        constant = self._published.constant(row.stack)
        wanted = [*_few_blocks(row, for_speed=True), *_few_blocks(constant, for_speed=True)]
        return self._are_kept(wanted)

    def _are_kept(self, wanted: Sequence[TraceRequest]) -> bool:
        kept = self._only_kept
        return kept is None or all(kept.get(one) is not None for one in wanted)

    def _records_for(self, wanted: Sequence[TraceRequest]) -> list[TraceRecord]:
        key = tuple(wanted)
        if key not in self._records:
            found = self._traced(wanted)
            more = memory.further_requests(found)
            self._records[key] = [*found, *(self._traced(more) if more else ())]
        return self._records[key]

    def _traced(self, wanted: Sequence[TraceRequest]) -> list[TraceRecord]:
        records: list[TraceRecord] = []
        for one in self._tracer.records(wanted):
            if isinstance(one, TraceRefused):
                raise MusterError(one.what, why=one.why, fix=one.fix)
            records.append(one)
        return records


def _few_blocks(row: Row, *, for_speed: bool = False) -> list[TraceRequest]:
    """Return requests for a few blocks; a speed needs no more than those with few shards."""
    wanted = memory.trace_requests(row.work, row.candidate, kernels="cuda", keep_log=True)
    if not for_speed:
        return wanted
    fewest = min(one.candidate.layout.shards for one in wanted)
    return [one for one in wanted if one.candidate.layout.shards == fewest]


def tracer(folder: Path) -> Tracer:
    """Return a tracer that keeps its records in a folder."""
    return Tracer(cache=folder, workers=1, say=lambda text: print(text, flush=True))
