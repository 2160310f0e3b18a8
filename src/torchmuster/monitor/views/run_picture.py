"""The current state of a run, independent of the view that shows it."""

import contextlib
import math
import shutil
import socket
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.checkpoints.foreign import Completeness, Condition
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.history import node_records, run_state
from torchmuster.launch.history.script_checkpoints import ScriptCheckpoint
from torchmuster.monitor.alert_watch import AlertNews, AlertWatch
from torchmuster.monitor.alerts import RUN_FINISHED
from torchmuster.monitor.catalogue import EVALUATION, HOST_DISK_FREE, TIME_SHARE
from torchmuster.monitor.collecting import collector
from torchmuster.monitor.collecting.growing_file import GrowingFile
from torchmuster.monitor.collecting.run_metrics import PARTS, RunMetrics
from torchmuster.monitor.metric import Metric, Sample
from torchmuster.runfolder import RunFolder, run_name

# More points than any view draws; longer curves are stored at a coarser, uniform resolution.
_MOST_PARTS = 4096
# Larger values count as infinite: they would flatten the rest of the curve.
_LARGEST = 1e100


@dataclass(slots=True)
class _Part:
    """A bucket of neighbouring values with the positions of its extremes."""

    low: tuple[float, float] | None = None  # (value, x); None: no finite value yet
    high: tuple[float, float] | None = None
    total: float = 0.0
    numbers: int = 0
    gap_x: float | None = None  # position of a NaN
    values: int = 0  # including NaN

    def add(self, other: "_Part") -> None:
        if other.low is not None:
            self.low = other.low if self.low is None else min(self.low, other.low)
        if other.high is not None:
            self.high = other.high if self.high is None else max(self.high, other.high)
        self.total += other.total
        self.numbers += other.numbers
        self.values += other.values
        if self.gap_x is None:
            self.gap_x = other.gap_x

    @property
    def mean(self) -> float:
        return self.total / self.numbers if self.numbers else math.nan

    def points(self) -> Iterator[tuple[float, float]]:
        """Yield the minimum, the maximum and a gap, in order of x."""
        found = {(x, value) for value, x in filter(None, (self.low, self.high))}
        if self.gap_x is not None:
            found.add((self.gap_x, math.nan))
        yield from sorted(found, key=lambda one: one[0])


class LongCurve:
    """Values over x, appended in order."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._each = 1  # number of values per bucket

    def add(self, x: float, value: object) -> None:
        """Append a value; NaN is a gap."""
        number = float(value) if isinstance(value, int | float) else math.nan
        if math.isfinite(number) and abs(number) <= _LARGEST:
            new = _Part((number, x), (number, x), number, 1, None, 1)
        else:
            new = _Part(gap_x=x, values=1)
        if not self._parts or self._parts[-1].values >= self._each:
            if len(self._parts) >= _MOST_PARTS:
                self._parts = _joined(self._parts, 2)
                self._each *= 2
            self._parts.append(_Part())
        self._parts[-1].add(new)

    @property
    def values(self) -> list[float]:
        """The means of all buckets, evenly spaced; NaN for a bucket without numbers."""
        return [part.mean for part in self._parts]

    @property
    def has_numbers(self) -> bool:
        """Whether there is anything to draw."""
        return any(part.numbers for part in self._parts)

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same number."""
        extremes = [one for part in self._parts for one in (part.low, part.high) if one is not None]
        return len({value for value, _ in extremes}) == 1

    def points(self, most: int) -> list[tuple[float, float]]:
        """Return at most ``most`` points (x, value) including the extremes; a gap is NaN."""
        each = math.ceil(len(self._parts) / max(1, most // 3))  # a bucket yields up to three points
        if len(self._parts) <= most and all(part.values == 1 for part in self._parts):
            each = 1
        parts = _joined(self._parts, each) if each > 1 else self._parts
        return [point for part in parts for point in part.points()]


def _joined(parts: Sequence[_Part], count: int) -> list[_Part]:
    """Return fewer buckets, each merged from ``each`` neighbours."""
    found = []
    for at in range(0, len(parts), count):
        whole = _Part()
        for part in parts[at : at + count]:
            whole.add(part)
        found.append(whole)
    return found


# The curves: fields of the step lines.
CURVES = ("loss", "learning_rate", "samples_per_s", "tokens_per_s", "step_s")
_MOST_EVENTS = 200


@dataclass(frozen=True, kw_only=True)
class RunPicture:
    """The known state of a run at one moment."""

    id: str
    job: str
    phase: str
    headline: str
    lasts_s: float
    until_unix_s: float  # the time of this state: now, or the run's end
    heard_s: float | None  # time since the last sign of activity; None: never
    values: Mapping[Metric, float]  # metrics with one value per run
    evaluation: Mapping[str, float]  # the last one
    remark: str  # remark of the last step line on the time breakdown, if any
    shares: Mapping[str, float]
    spent_s: Mapping[str, float]  # in steps that count, by category, since the start
    curves: Mapping[str, LongCurve]  # by field, over steps
    ranks: Sequence[tuple[str, Heartbeat]]  # with their hosts
    events: Sequence[run_state.RunEvent]  # the last of them
    first_steps: Mapping[
        float, float
    ]  # by the time of a "running" event, when its first step began
    alerts: Sequence[AlertNews]
    news: Sequence[AlertNews]  # since the last look
    checkpoint: ScriptCheckpoint | None = None  # the newest one of the user's own script
    condition: Condition | None = None  # of that checkpoint

    @property
    def hang(self) -> str | None:
        """The reported hang of a run that is not over, in one line; None without one."""
        hang = run_state.EventSummary.of(self.events).hang
        if hang is None or self.is_over:
            return None
        return str(hang.facts.get("what", "the ranks hang"))

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.phase not in run_state.ACTIVE


class RunWatch:
    """Polls one run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._job = run_name(run)
        self._metrics = RunMetrics(run, self._job, on_steps=self._take_in)
        self._forget()
        self._events_file = GrowingFile(run.path / run_state.EVENTS)
        self._events: deque[run_state.RunEvent] = deque(maxlen=_MOST_EVENTS)
        self._running_unix_s: list[float] = []  # the times of "running" events
        self._watching = AlertWatch()
        self._complete: ScriptCheckpoint | None = None

    def _forget(self) -> None:
        self._curves = {name: LongCurve() for name in CURVES}
        self._spent_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._last_step = 0
        self._remark = ""
        self._first_steps: dict[float, float] = {}

    @property
    def is_behind(self) -> bool:
        """Whether the last poll left data unread."""
        return self._metrics.is_behind

    def catch_up(self, within_s: float) -> None:
        """Read the existing data before the first poll, for at most this time."""
        give_up_s = time.monotonic() + within_s
        self._follow_events()
        self._metrics.catch_up()
        while self.is_behind and time.monotonic() < give_up_s:
            self._metrics.catch_up()

    def look(self, now_unix_s: float) -> RunPicture:
        """Return the current state of the run."""
        state = run_state.read_state(self._run)
        self._follow_events()
        samples = list(self._metrics.samples(now_unix_s))
        nodes = node_records.read_node_ranks(self._run, now_unix_s)
        labels = (self._job, self._run.id)
        samples += [*collector.rank_number(nodes, labels), *collector.rank_samples(nodes, labels)]
        samples += _run_picture_room(self._run)
        news = self._watching.look(samples, now_unix_s)
        until = now_unix_s if state is None or state.active else state.since_unix_s
        heard = self._heard_unix_s(nodes)
        checkpoint = self._metrics.script_checkpoint
        return RunPicture(
            id=self._run.id,
            job=self._job,
            phase=state.phase if state else "submitted",
            headline=state.headline if state else "",
            lasts_s=max(0.0, until - state.started_unix_s) if state else 0.0,
            until_unix_s=until,
            heard_s=None if heard is None else max(0.0, now_unix_s - heard),
            values=_of_the_run(samples),
            evaluation={one.labels[-1]: one.value for one in samples if one.metric is EVALUATION},
            remark=self._remark,
            shares={one.labels[-1]: one.value for one in samples if one.metric is TIME_SHARE},
            spent_s=dict(self._spent_s),
            curves=self._curves,
            ranks=sorted(
                ((node.host, heartbeat) for node in nodes for heartbeat in node.ranks),
                key=lambda one: one[1].rank,
            ),
            events=tuple(self._events),
            first_steps=dict(self._first_steps),
            # That a run has finished is news for a chat, and no alert where its phase is shown.
            alerts=[one for one in self._watching.raised if one.alert.name != RUN_FINISHED],
            news=news,
            checkpoint=checkpoint,
            condition=self._condition_of(checkpoint) if checkpoint is not None else None,
        )

    def _condition_of(self, checkpoint: ScriptCheckpoint) -> Condition:
        """Look at a checkpoint's files, until they are complete: other ranks may still be writing."""
        if checkpoint != self._complete:
            found = checkpoint.condition
            if found.state is not Completeness.COMPLETE:
                return found
            self._complete = checkpoint
        return Condition(state=Completeness.COMPLETE)

    def _take_in(self, anew: bool, lines: Sequence[dict[str, Any]]) -> None:
        if anew:
            self._forget()
        for line in lines:
            step = line.get("step")
            if not isinstance(step, int):
                continue
            for name, curve in self._curves.items():
                if name in line:
                    curve.add(step, line[name])
            self._count_time(line, step)
            self._note_first_step(line)
            self._remark = str(line.get("verdict") or "")

    def _count_time(self, line: dict[str, Any], step: int) -> None:
        step_s = line.get("step_s")
        took_s = max(0, step - self._last_step) * _run_picture_number(step_s)
        for part in PARTS:
            self._spent_s[part] += took_s * _run_picture_number(line.get(f"{part}_share"))
        self._last_step = step

    def _note_first_step(self, line: dict[str, Any]) -> None:
        """Remember when the first step of an attempt began, as far as its line tells."""
        at_unix_s = _run_picture_number(line.get("at_unix_s"))
        attempt = bisect_right(self._running_unix_s, at_unix_s) - 1
        if attempt >= 0:
            began_unix_s = at_unix_s - _run_picture_number(line.get("step_s"))
            self._first_steps.setdefault(self._running_unix_s[attempt], began_unix_s)

    def _follow_events(self) -> None:
        anew, lines = self._events_file.new_lines()
        if anew:
            self._events.clear()
        self._events.extend(event for line in lines if (event := run_state.event_of(line)))
        if lines:
            running = [one.at_unix_s for one in self._events if one.name == "running"]
            self._running_unix_s = sorted(running)

    def _heard_unix_s(self, nodes: Sequence[node_records.NodeRanks]) -> float | None:
        """Return when the launcher, rank 0 or a host last wrote something."""
        heard = [node.at_unix_s for node in nodes]
        if self._metrics.changed_unix_s is not None:
            heard.append(self._metrics.changed_unix_s)
        with contextlib.suppress(OSError):
            heard.append(self._run.state.stat().st_mtime)
        return max(heard, default=None)


def _run_picture_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _run_picture_room(run: RunFolder) -> Iterator[Sample]:
    """Yield the free space on the run's disk, for users who run no exporter."""
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(run.path).free
        yield Sample(HOST_DISK_FREE, (socket.gethostname(),), float(free_bytes))


def _of_the_run(samples: Sequence[Sample]) -> dict[Metric, float]:
    return {
        one.metric: one.value for one in samples if not one.metric.labels and len(one.labels) == 2
    }
