"""Memory of the preferred candidates with a simulated allocator; cached next to the traces."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from torchmuster import untrusted
from torchmuster.errors import Impossible
from torchmuster.plan.answer import Forecast
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.record import TraceRecord
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search import decide
from torchmuster.plan.search.candidates import Explored, as_forecast
from torchmuster.plan.tracing.cache import versions
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.runfolder import write_atomically

# Memory cached by the allocator (10 % of the tensors, where simulated) and the simulation's band.
_LEAST_RESERVED = 1.15


def simulate_preferred(asked: PlanRequest, explored: Explored) -> None:
    """Simulate the allocator for the preferred candidate; if it does not fit, for the next one."""
    card_bytes = asked.hardware.card.memory_bytes
    hopeful = [
        one
        for one in explored.forecasts
        if one.fits or (one.could_fit and one.memory.low_bytes * _LEAST_RESERVED <= card_bytes)
    ]
    simulated: set[Candidate] = set()
    while hopeful:
        one = decide.preferred(hopeful)
        if one.candidate in simulated:
            return  # and it fits
        simulated.add(one.candidate)
        found = with_allocator(one, explored, asked)
        explored.forecasts[explored.forecasts.index(one)] = found
        fitting = [one for one in explored.forecasts if one.fits]
        hopeful = fitting or [one for one in hopeful if one.candidate not in simulated]


def with_allocator(one: Forecast, explored: Explored, asked: PlanRequest) -> Forecast:
    """Return a forecast with the allocator simulated, or unchanged if that is not possible.

    Its traces may be the first with this micro-batch size: they must agree with the computation.
    """
    records = explored.traces.of(one.candidate, with_log=True)
    computed_from = explored.traces.of(one.candidate)
    if isinstance(records, TraceRefused) or isinstance(computed_from, TraceRefused):
        return one
    try:
        for traced in records:
            memory.check_records(computed_from, traced)
    except Impossible as error:
        explored.doubts.append(error)
    needed = simulate_allocator(records, one.candidate, hardware=asked.hardware)
    return as_forecast(one.candidate, needed, asked, time=one.time, samples_per_s=one.samples_per_s)


def simulate_allocator(
    records: Sequence[TraceRecord], candidate: Candidate, *, hardware: Hardware
) -> memory.Memory:
    """Return what a rank needs, from the cache or simulated now."""
    kept = _simulated_place(records, candidate, hardware)
    if kept is None:
        return memory.predict_memory(records, candidate, hardware=hardware)
    with suppress(OSError, untrusted.Unreadable):
        return untrusted.read_typed(kept, msgspec.json.Decoder(memory.Memory).decode)
    needed = memory.predict_memory(records, candidate, hardware=hardware)
    if needed.reserved_bytes is None:
        return needed  # nothing was simulated
    with suppress(OSError):
        write_atomically(kept, msgspec.json.encode(needed).decode(), durable=False)
    return needed


def _simulated_place(
    records: Sequence[TraceRecord], candidate: Candidate, hardware: Hardware
) -> Path | None:
    """Return the cache file for exactly these traces and their times; None if there are no logs."""
    if any(one.log is None for one in records):
        return None
    digest = hashlib.blake2b(versions(), digest_size=16)
    digest.update(msgspec.json.encode((records, candidate, hardware)))
    return Path(str(records[0].log)).parent / f"{digest.hexdigest()}.memory.json"
