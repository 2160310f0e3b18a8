"""Where the time of a step goes: every moment of it has one name, so that the shares sum to the step."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from torchmuster.bench.profile.intervals import Intervals
from torchmuster.bench.profile.recording_words import Step
from torchmuster.bench.profile.trace_kinds import Lane
from torchmuster.bench.profile.trace_lanes import TraceLanes


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Seconds of one step, the mean of the steps that were looked at."""

    compute_s: float = 0.0  # and nothing is sent meanwhile
    overlapped_s: float = 0.0  # computing, with communication beside it
    exposed_s: float = 0.0  # communication, or waiting for other ranks, with nothing beside it
    optimizer_s: float = 0.0
    data_s: float = 0.0  # waiting for the loader
    reads_s: float = 0.0  # values brought to the host; on a device also what it idles for them
    save_s: float = 0.0
    copies_s: float = 0.0  # on a device: nothing but copies
    idle_s: float = 0.0  # none of these: the host's own code, or a device without work

    @property
    def total_s(self) -> float:
        """The whole step."""
        return sum(self.by_name().values())

    def by_name(self) -> dict[str, float]:
        """Return seconds by the share's name: compute, overlapped, ..."""
        return {one.name.removesuffix("_s"): float(getattr(self, one.name)) for one in fields(self)}

    def part(self, name: str) -> float:
        """Return a share as a part of the step, from 0 to 1."""
        whole_s = self.total_s
        return self.by_name()[name] / whole_s if whole_s else 0.0


WORDS: Mapping[str, str] = {
    "compute": "compute",
    "overlapped": "compute beside communication",
    "exposed": "waiting for communication",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "reads": "values read to the host",
    "save": "saving",
    "copies": "copies",
    "idle": "other code, or idle",
}


def of_facts(steps: Iterable[Step], *, beside: float | None, unused: float | None) -> Shares:
    """Return the shares of steps as the host saw them.

    ``beside`` and ``unused`` are what parts of forward and backward have communication beside them and no operation
    at all, which only a trace can tell.
    """
    taken = list(steps)
    count = max(len(taken), 1)

    def mean(name: str) -> float:
        return sum(float(getattr(step, name)) for step in taken) / count

    passes_s = mean("forward_s") + mean("backward_s") - mean("waiting_s")
    overlapped_s, unused_s = passes_s * (beside or 0.0), passes_s * (unused or 0.0)
    return Shares(
        compute_s=max(passes_s - overlapped_s - unused_s, 0.0),
        overlapped_s=overlapped_s,
        exposed_s=mean("waiting_s") + mean("communication_s"),
        optimizer_s=mean("optimizer_s"),
        data_s=mean("data_s"),
        reads_s=mean("reads_s"),
        save_s=mean("save_s"),
        idle_s=unused_s + mean("other_s"),
    )


def moments(lanes: TraceLanes) -> dict[str, Intervals]:
    """Return when each share of :class:`Shares` was had, of all steps that are held."""
    found = _on_device(lanes) if lanes.on_device else _on_host(lanes)
    left = lanes.windows()
    named: dict[str, Intervals] = {}
    for name, when in found:
        taken = left & when
        named[name] = named[name] | taken if name in named else taken
        left = left - when
    named["idle"] = left
    return named


def of_trace(lanes: TraceLanes) -> Shares:
    """Return the shares of a step, from its trace alone."""
    count = max(len(lanes.steps), 1)
    return Shares(
        **{f"{name}_s": when.total / 1e6 / count for name, when in moments(lanes).items()}
    )


def _on_host(lanes: TraceLanes) -> Iterator[tuple[str, Intervals]]:
    """Give the shares of a rank whose host computes, what decides first at the beginning."""
    for name, lane in (("save", Lane.SAVE), ("data", Lane.DATA), ("reads", Lane.READS)):
        yield name, lanes.lane(lane)
    sending, work = lanes.lane(Lane.SENDING), lanes.host_work
    yield "exposed", lanes.lane(Lane.COMMUNICATION)
    yield "optimizer", lanes.lane(Lane.OPTIMIZER)
    yield "overlapped", work & sending
    yield "compute", work
    yield "exposed", sending


def _on_device(lanes: TraceLanes) -> Iterator[tuple[str, Intervals]]:
    """Give the shares of a rank whose device computes; what the host does counts only where the device idles."""
    work, sending = lanes.lane(Lane.WORK), lanes.lane(Lane.SENDING)
    yield "overlapped", work & sending
    yield "optimizer", work & lanes.lane(Lane.OPTIMIZER_ON_DEVICE)
    yield "compute", work
    yield "exposed", sending
    copies = lanes.lane(Lane.COPIES)
    yield "copies", copies
    yield "save", lanes.lane(Lane.SAVE)
    yield "data", lanes.lane(Lane.DATA)
    # After the host has waited for the device, the device waits until the host has given it new work.
    idle = lanes.windows() - (work | sending | copies)
    yield "reads", idle.holding_any(lanes.lane(Lane.BLOCKED).ends)
    yield "reads", lanes.lane(Lane.READS)


def of_passes(lanes: TraceLanes) -> tuple[float, float] | None:
    """Return what parts of forward and backward had communication beside them, and no operation at all.

    Without the time that was only waiting; None where the passes are not marked.
    """
    passes = (lanes.lane(Lane.FORWARD) | lanes.lane(Lane.BACKWARD)) & lanes.windows()
    sending, work = lanes.lane(Lane.SENDING), lanes.host_work
    busy = passes - (sending - work) - lanes.lane(Lane.READS)
    if not busy.total:
        return None
    return (busy & work & sending).total / busy.total, (busy - work).total / busy.total
