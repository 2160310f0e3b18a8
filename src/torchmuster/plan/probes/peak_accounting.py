"""Evaluate a log of storages and operations: peaks by stage and category, timeline, allocations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchmuster.plan.probes.stages import AllocationLog, Done, Event, Sized, Stage, Storage
from torchmuster.plan.record import (
    Allocation,
    Category,
    Peak,
    Stretch,
    TracedCollective,
    TracedOperation,
)


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of storages, by their numbers."""

    parameters: frozenset[int]
    gradients: frozenset[int]
    optimizer: frozenset[int]
    logits: frozenset[int]  # what the model returned
    has_blocks: bool


def categories(log: AllocationLog, roles: Roles) -> list[Category]:
    """Return the category of each storage, by number."""
    ends = _ends(log.events)
    return [
        _category(number, storage, ends.get(number), roles)
        for number, storage in enumerate(log.storages)
    ]


def _category(number: int, storage: Storage, end: Stage | None, roles: Roles) -> Category:
    if number in roles.parameters:
        return "parameters"
    if number in roles.gradients:
        return "gradients"
    if number in roles.optimizer:
        return "optimizer"
    if number in roles.logits:
        return "logits"
    if storage.collective:
        return "collectives"
    made = storage.made_in
    if made.phase == "loss":
        return "logits"
    if made.phase == "forward":
        kept = end is None or end[:2] != made[:2]
        return "activations" if kept else "temporaries"
    if made.phase == "backward":
        if storage.recomputed:
            return "activations"
        if roles.has_blocks and made.block is None and made.after_block is None:
            return "logits"  # before the first block's backward there is only the head
    return "temporaries"


def _ends(events: Iterable[Event]) -> dict[int, Stage]:
    """Return the stage in which each storage was last freed."""
    found: dict[int, Stage] = {}
    now = Stage()
    for event in events:
        if isinstance(event, Stage):
            now = event
        elif isinstance(event, Sized) and not event.size_bytes:
            found[event.number] = now
    return found


@dataclass
class _Highest:
    """The highest point of one stage so far."""

    total: int
    by_category: dict[str, int]
    operation: str = ""
    module: str = ""


@dataclass
class Replay:
    """Replay events and track the live bytes."""

    of_category: Sequence[Category]
    ignored: frozenset[int] = frozenset()  # storages on another device
    total: int = 0
    by_category: dict[str, int] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)

    def take(self, event: Sized) -> None:
        """Apply one event."""
        if event.number in self.ignored:
            return
        more = event.size_bytes - self._sizes.get(event.number, 0)
        self._sizes[event.number] = event.size_bytes
        category = self.of_category[event.number]
        self.total += more
        self.by_category[category] = self.by_category.get(category, 0) + more

    def peaks(self, events: Iterable[Event], begin: Stage) -> tuple[Peak, ...]:
        """Return the peak of each stage, in the order of the stages."""
        highest: dict[Stage, _Highest] = {}
        place = self._at(highest, begin)
        for event in events:
            if isinstance(event, Stage):
                place = self._at(highest, event)
            elif isinstance(event, Sized):
                self.take(event)
                if self.total > place.total:
                    place.total, place.by_category = self.total, dict(self.by_category)
                    place.operation, place.module = event.operation, event.module
        return tuple(
            Peak(
                phase=stage.phase,
                micro_batch=stage.micro_batch,
                block=stage.block,
                after_block=stage.after_block,
                peak_bytes=one.total,
                by_category={name: size for name, size in one.by_category.items() if size},
                operation=one.operation,
                module=one.module,
            )
            for stage, one in highest.items()
        )

    def _at(self, highest: dict[Stage, _Highest], stage: Stage) -> _Highest:
        """Return a stage's highest point, which is at least its start."""
        place = highest.get(stage)
        if place is None or place.total < self.total:
            place = highest[stage] = _Highest(self.total, dict(self.by_category))
        return place


def timeline(events: Iterable[Event], begin: Stage) -> tuple[Stretch, ...]:
    """Return the work between collectives or borders of blocks, in order."""
    return tuple(_stretches(events, begin))


def _stretches(events: Iterable[Event], now: Stage) -> Iterator[Stretch]:
    added: dict[tuple[str, str], list[int]] = {}
    recomputed = False

    def stretch(collective: TracedCollective | None = None) -> Stretch:
        operations = tuple(
            TracedOperation(
                name=name,
                dtype=dtype,
                count=one[0],
                flops=one[1],
                moved_bytes=one[2],
                made_bytes=one[3],
            )
            for (name, dtype), one in added.items()
        )
        added.clear()
        return Stretch(
            phase=now.phase,
            micro_batch=now.micro_batch,
            block=now.block,
            operations=operations,
            collective=collective,
            recomputed=recomputed and collective is None,
        )

    for event in events:
        if isinstance(event, Done):
            if event.recomputed is not recomputed:
                if added:
                    yield stretch()
                recomputed = event.recomputed
            sums = added.setdefault((event.name, event.dtype), [0, 0, 0, 0])
            sums[0] += 1
            sums[1] += event.flops
            sums[2] += event.moved_bytes
            sums[3] += event.made_bytes
        elif isinstance(event, Stage | TracedCollective):
            if added:
                yield stretch()
            if isinstance(event, TracedCollective):
                yield stretch(event)
            else:
                now = event
    if added:
        yield stretch()


def allocations(
    log: AllocationLog,
    of_category: Sequence[Category],
    ignored: frozenset[int],
    steps: Mapping[int, int],
) -> Iterator[Allocation]:
    """Return the log as an allocator would see it; ``steps`` are the events that start a step."""
    sizes: dict[int, int] = {}
    for place, event in enumerate(log.events):
        if place in steps:
            yield Allocation(kind="mark", mark=f"step {steps[place]}")
        if isinstance(event, Stage):
            words = (event.phase, event.micro_batch, "" if event.block is None else event.block)
            yield Allocation(kind="mark", mark=" ".join(map(str, words)).strip())
        elif isinstance(event, Sized) and event.number not in ignored:
            before = sizes.pop(event.number, 0)
            what = log.storages[event.number], of_category[event.number]
            if before:
                yield _allocation("give", event.number, before, *what)
            if event.size_bytes:
                sizes[event.number] = event.size_bytes
                yield _allocation("take", event.number, event.size_bytes, *what)


def _allocation(
    kind: str, number: int, size_bytes: int, storage: Storage, category: Category
) -> Allocation:
    return Allocation(
        kind=kind,  # type: ignore[arg-type]
        number=number,
        size_bytes=size_bytes,
        stream=storage.stream,
        category=category,
    )
