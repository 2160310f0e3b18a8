"""One step of a rank as rows of few coloured pieces for drawing."""

from dataclasses import dataclass

from torchmuster.bench.profile.intervals import Intervals
from torchmuster.bench.profile.trace_events import Lane
from torchmuster.bench.profile.trace_lanes import TraceLanes

_PLACES = 480


@dataclass(frozen=True, kw_only=True)
class Piece:
    """An activity, in seconds since the start of the step."""

    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Pictured:
    """A step of median length: the rank's activity, and messages in flight."""

    step: int | None
    took_s: float
    doing: tuple[Piece, ...]
    sending: tuple[Piece, ...]


def picture_of(lanes: TraceLanes, moments: dict[str, Intervals]) -> Pictured | None:
    """Return the step of median length."""
    if not lanes.steps:
        return None
    step = sorted(lanes.steps, key=lambda one: one.end - one.begin)[len(lanes.steps) // 2]
    window = Intervals.of([(step.begin, step.end)])
    if not window.total:
        return None
    doing = {name: when & window for name, when in moments.items()}
    sending = {"sending": lanes.lane(Lane.SENDING) & window}
    return Pictured(
        step=step.number,
        took_s=window.total / 1e6,
        doing=_pieces(doing, step.begin, step.end),
        sending=_pieces(sending, step.begin, step.end),
    )


def _pieces(rows: dict[str, Intervals], begin: float, end: float) -> tuple[Piece, ...]:
    """Label each of many equal parts of the step with its dominant activity.

    Merge equal neighbours.
    """
    width = (end - begin) / _PLACES
    most: list[tuple[float, str]] = [(0.0, "")] * _PLACES
    for name, when in rows.items():
        had = [0.0] * _PLACES
        for first, last in when:
            at = int((first - begin) / width)
            while at < _PLACES and begin + at * width < last:
                left, right = begin + at * width, begin + (at + 1) * width
                had[at] += max(min(last, right) - max(first, left), 0.0)
                at += 1
        most = [max(before, (amount, name)) for before, amount in zip(most, had, strict=True)]
    found: list[Piece] = []
    for at, (amount, name) in enumerate(most):
        if amount < width / 4:
            continue
        begin_s, end_s = at * width / 1e6, (at + 1) * width / 1e6
        if found and found[-1].name == name and abs(found[-1].end_s - begin_s) < width / 1e9:
            found[-1] = Piece(name=name, begin_s=found[-1].begin_s, end_s=end_s)
        else:
            found.append(Piece(name=name, begin_s=begin_s, end_s=end_s))
    return tuple(found)
