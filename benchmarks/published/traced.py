"""Memory and speed of a published row as ``muster plan`` forecasts them: from traces."""

from rows import Published, Row

from torchmuster.plan import estimate
from torchmuster.plan.record import TraceRecord
from torchmuster.plan.tracer import Tracer
from torchmuster.units import GiB


class Traced:
    """Forecasts for the rows that the product itself could train."""

    def __init__(self, published: Published, tracer: Tracer) -> None:
        self._published = published
        self._tracer = tracer
        self._records: dict[str, list[TraceRecord]] = {}

    def tensor_gib(self, row: Row) -> float:
        """Return the peak of tensors on a rank."""
        hardware = self._published.hardware(row)
        memory = estimate.predict_memory(self._records_of(row), row.candidate, hardware=hardware)
        return memory.tensor_bytes / GiB

    def tokens_per_s(self, row: Row) -> float:
        """Return what one card does, without the constant of its card."""
        hardware = self._published.hardware(row)
        time = estimate.predict_time(self._records_of(row), row.candidate, hardware=hardware)
        assert time is not None, "the rates of every card are known"
        assert time.tokens_per_s is not None, "the rows are of text"
        return time.tokens_per_s / row.spread.ranks / estimate.time_constant(hardware.card)

    def _records_of(self, row: Row) -> list[TraceRecord]:
        if row.name not in self._records:
            wanted = estimate.trace_requests(row.work, row.candidate, kernels="cuda")
            self._records[row.name] = [self._tracer.trace(request) for request in wanted]
        return self._records[row.name]
