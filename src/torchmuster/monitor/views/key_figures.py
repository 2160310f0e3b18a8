"""The key figures of a run, in the order in which every view shows them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.monitor import catalogue
from torchmuster.monitor.metric import Metric
from torchmuster.units import format_bytes, format_seconds

_OLD_LINE_S = 10.0  # with fast steps, step lines come at least this often
_MOST_NAMED = 8
# If the waiting times of the ranks differ by this share of the time, one of them is a straggler.
_MUCH_WAITING = 0.2
_SILENT_AFTER_S = 10.0


@dataclass(frozen=True, kw_only=True)
class _Kind:
    metric: Metric
    title: str
    text: Callable[[float], str]  # "": not shown
    line: str = "{title} {text}"


@dataclass(frozen=True, kw_only=True)
class KeyFigure:
    """One key figure: title, value, and both as one text."""

    title: str
    text: str
    line: str


def key_figures(values: Mapping[Metric, float], *, ended: bool = False) -> Iterator[KeyFigure]:
    """Yield the key figures that the run has; those of an ended run have no ages."""
    for kind in _KINDS:
        value = values.get(kind.metric)
        text = kind.text(value) if value is not None else ""
        if kind.metric is catalogue.CHECKPOINT_AGE and text:
            step = values.get(catalogue.CHECKPOINT_STEP)  # none yet: the age is the run's
            last = "" if step is None else f"step {step:,.0f}"
            text = last if ended and last else f"{last}, {text}" if last else "not yet"
        elif kind.metric is catalogue.STEP_AGE and ended:
            continue
        if text:
            yield KeyFigure(
                title=kind.title, text=text, line=kind.line.format(title=kind.title, text=text)
            )


def _some(value: float) -> str:
    return f"{value:.0f}" if value else ""


_KINDS = (
    _Kind(metric=catalogue.STEPS, title="step", text=lambda value: f"{value:,.0f}"),
    _Kind(metric=catalogue.EPOCH, title="epoch", text=lambda value: f"{value:.0f}"),
    _Kind(
        metric=catalogue.LOSS,
        title="loss",
        text=lambda value: "NaN" if math.isnan(value) else f"{value:.4f}",
    ),
    _Kind(
        metric=catalogue.LEARNING_RATE,
        title="learning rate",
        text=lambda value: f"{value:.3g}",
        line="lr {text}",
    ),
    _Kind(
        metric=catalogue.GRADIENT_NORM,
        title="gradient norm",
        text=lambda value: f"{value:.3g}",
        line="norm {text}",
    ),
    _Kind(
        metric=catalogue.SAMPLES_RATE,
        title="samples/s",
        text=lambda value: f"{value:,.1f}",
        line="{text} {title}",
    ),
    _Kind(
        metric=catalogue.TOKENS_RATE,
        title="tokens/s",
        text=lambda value: f"{value:,.0f}",
        line="{text} {title}",
    ),
    _Kind(
        metric=catalogue.STEP_TIME,
        title="ms/step",
        text=lambda value: f"{1000 * value:,.1f}",
        line="{text} {title}",
    ),
    _Kind(metric=catalogue.MFU, title="MFU", text=lambda value: f"{value:.0%}"),
    _Kind(
        metric=catalogue.MEMORY_PEAK,
        title="memory",
        text=lambda value: format_bytes(int(value)),
        line="{text}",
    ),
    _Kind(metric=catalogue.GOODPUT, title="goodput", text=lambda value: f"{value:.0%}"),
    _Kind(metric=catalogue.SKIPPED_STEPS, title="skipped", text=_some, line="{text} {title}"),
    _Kind(metric=catalogue.RUN_RESTARTS, title="restarts", text=_some, line="{text} {title}"),
    _Kind(
        metric=catalogue.CHECKPOINT_AGE,
        title="saved",
        text=lambda value: f"{format_seconds(value)} ago",
    ),
    _Kind(
        metric=catalogue.STEP_AGE,
        title="last step line",
        text=lambda value: f"{format_seconds(value)} ago" if value > _OLD_LINE_S else "",
    ),
)


def odd_ranks(heartbeats: Sequence[Heartbeat]) -> Iterator[str]:
    """Yield a text for the straggler and one for ranks without a recent heartbeat."""
    slowest = _held_up_by(heartbeats)
    if slowest is not None:
        yield f"straggler: the other ranks wait for rank {slowest}"
    silent = [str(beat.rank) for beat in heartbeats if beat.silent_s > _SILENT_AFTER_S]
    if len(silent) > _MOST_NAMED:
        silent = [*silent[:_MOST_NAMED], "…"]
    if silent:
        yield f"no heartbeat from rank {', '.join(silent)}"


def _held_up_by(heartbeats: Sequence[Heartbeat]) -> int | None:
    """Return the straggler: with gradient averaging, the rank that waits least for the others."""
    waits = {
        heartbeat.rank: heartbeat.communication_share
        for heartbeat in heartbeats
        if heartbeat.communication_share is not None
    }
    if len(waits) < 2:
        return None
    slowest = min(waits, key=lambda rank: waits[rank])
    return slowest if max(waits.values()) - waits[slowest] >= _MUCH_WAITING else None
