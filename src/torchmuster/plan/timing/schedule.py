"""Simulate a step: compute, links with their own queues, and the waits between them.

On accelerators FSDP gathers a block while the previous one computes, and reduces its gradients
during the next block's backward, but waits for the reduction before that; DDP reduces gradient
buckets as they fill, and waits for all of them at the end. On the CPU with gloo, every collective
blocks its rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate
from torchmuster.plan.record import TracedCollective, TraceRecord
from torchmuster.plan.timing import rates as links
from torchmuster.plan.timing.rates import Rates
from torchmuster.plan.timing.timeline import TimelinePace, TimelinePart, gradient_bytes, traced_like
from torchmuster.units import KiB, MiB

BUCKET_BYTES = 25 * MiB  # DDP's default
_A_FEW_NUMBERS = KiB  # such as counts of all ranks: compute waits for them


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Where a step's time goes."""

    step_s: float
    compute_s: float
    communication_s: float


class _Event(NamedTuple):
    """A part of the step with its duration: work (``kind`` is empty), or a collective."""

    seconds: float
    kind: str = ""
    far: bool = False  # passes between machines
    between_copies: bool = False
    needed_now: bool = False


def run_schedule(
    step: Sequence[TimelinePart],
    duration: Callable[[TimelinePace], float],
    *,
    record: TraceRecord,
    candidate: Candidate,
    hardware: Hardware,
    rates: Rates,
) -> Spent:
    """Simulate a step; micro-batches before the last are simulated once and multiplied."""
    # Equal blocks share a tuple. Tuples are kept alive, since the id of a deleted one is reused.
    known: dict[int, tuple[tuple[TimelinePace, ...], list[_Event]]] = {}

    def events(part: TimelinePart) -> list[_Event]:
        if id(part.paces) not in known:
            found = [
                _Event(duration(pace))
                if pace.collective is None
                else _event(pace.collective, part.phase, candidate, hardware, rates)
                for pace in part.paces
            ]
            known[id(part.paces)] = part.paces, found
        return known[id(part.paces)][1]

    spent = [0.0, 0.0, 0.0]
    for last in (False, True):
        parts: Sequence[TimelinePart] = [part for part in step if part.last_micro_batch is last]
        if not parts:
            continue
        if candidate.strategy == "ddp":
            parts = list(_with_buckets(parts, record, last=last))
        clock = _Clock(beside=rates.beside)
        for part in parts:
            clock.pass_through(part, events(part))
        clock.wait_for_all()
        for number, seconds in enumerate((clock.now, clock.computed, clock.sent)):
            spent[number] += parts[0].times * seconds
    return Spent(step_s=spent[0], compute_s=spent[1], communication_s=spent[2])


def _event(
    collective: TracedCollective, phase: str, candidate: Candidate, hardware: Hardware, rates: Rates
) -> _Event:
    group = links.link_group(collective, candidate, hardware)
    seconds = links.transfer_seconds(
        collective.kind, collective.moved_bytes, group, hardware=hardware, rates=rates
    )
    sharded = collective.kind in ("all_gather", "reduce_scatter")
    if sharded:
        seconds /= rates.sharded_communication
    if sharded and candidate.cpu_offload and hardware.card.kind != "cpu":
        # The rank's own shard is read from host memory, or written there.
        seconds += collective.moved_bytes / candidate.layout.shards / rates.host_link_bytes_s
    return _Event(
        seconds,
        kind=collective.kind,
        far=group.machines > 1,
        between_copies=collective.between_copies,
        needed_now=phase != "backward" or collective.moved_bytes <= _A_FEW_NUMBERS,
    )


def _with_buckets(
    parts: Sequence[TimelinePart], record: TraceRecord, *, last: bool
) -> Iterator[TimelinePart]:
    """Yield the parts with DDP's reductions in their place: buckets may span blocks."""
    waiting, sizes = 0, gradient_bytes(record)
    end = max((number for number, part in enumerate(parts) if part.phase == "backward"), default=0)
    made: dict[
        tuple[int, int, bool], tuple[TimelinePace, ...]
    ] = {}  # so that equal parts stay identical
    for number, part in enumerate(parts):
        if part.phase != "backward":
            yield part
            continue
        full, rest = 0, 0
        if last:
            waiting += sizes.get(traced_like(part.block, record), 0)
            full, waiting = divmod(waiting, BUCKET_BYTES)
            rest = waiting if number == end else 0
        key = id(part.paces), full, rest > 0
        if key not in made:
            kept = [pace for pace in part.paces if not _reduces(pace)]
            buckets = [BUCKET_BYTES] * full + ([rest] if rest else [])
            made[key] = (*kept, *(_bucket(part.paces[-1], size) for size in buckets))
        yield replace(part, paces=made[key])


def _reduces(pace: TimelinePace) -> bool:
    one = pace.collective
    return one is not None and one.kind == "all_reduce" and one.moved_bytes > _A_FEW_NUMBERS


def _bucket(like: TimelinePace, size_bytes: int) -> TimelinePace:
    collective = TracedCollective(
        kind="all_reduce", ranks=0, between_copies=False, moved_bytes=size_bytes, dtype="float32"
    )
    return like._replace(work=(), collective=collective)


@dataclass
class _Clock:
    """The time on a rank, and when its links will be free."""

    beside: bool
    now: float = 0.0
    computed: float = 0.0
    sent: float = 0.0
    part_before: float = 0.0  # when the part before this one began
    reduced: float = 0.0  # when the last reduction to shards ends
    blocks_back: int = 0  # blocks whose backward has begun
    gathered_back: list[float] = field(default_factory=list)  # when gathers for the backward end
    free: list[float] = field(default_factory=lambda: [0.0, 0.0])  # links within, and between

    def pass_through(self, part: TimelinePart, events: Sequence[_Event]) -> None:
        """Advance by a part: its compute and its collectives."""
        backward = part.phase == "backward"
        if part.phase in ("check", "update"):
            self.wait_for_all()
        if backward and part.block is not None:
            self.blocks_back += 1
        began = self.now
        for event in events:
            if event.kind:
                self._send(event, backward)
                continue
            if backward and 0 < self.blocks_back <= len(self.gathered_back):
                self.now = max(self.now, self.gathered_back[self.blocks_back - 1])
            self.now += event.seconds
            self.computed += event.seconds
        self.part_before = began

    def wait_for_all(self) -> None:
        """Wait until all links are free."""
        self.now = max(self.now, *self.free)

    def _send(self, event: _Event, backward: bool) -> None:
        self.sent += event.seconds
        if not self.beside:
            self.now += event.seconds
            return
        begin = self.now
        if event.kind == "all_gather" and not backward:
            begin = self.part_before  # the CPU runs ahead: it was launched during the previous part
        elif event.kind == "reduce_scatter":
            begin = self.now = max(self.now, self.reduced)
        elif event.between_copies:
            begin = self.reduced
        end = self.free[event.far] = max(begin, self.free[event.far]) + event.seconds
        if event.kind == "reduce_scatter":
            self.reduced = end
        elif event.kind == "all_gather" and backward:
            self.gathered_back.append(end)
        elif event.needed_now:
            self.now = max(self.now, end)
