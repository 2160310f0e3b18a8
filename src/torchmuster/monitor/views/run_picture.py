"""The current state of a run, independent of the view that shows it."""

import contextlib
import math
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.history import node_records, run_state
from torchmuster.monitor.alert_watch import AlertNews, AlertWatch
from torchmuster.monitor.alerts import RUN_FINISHED
from torchmuster.monitor.catalogue import EVALUATION, HOST_DISK_FREE, TIME_SHARE
from torchmuster.monitor.collecting import collector
from torchmuster.monitor.collecting.run_metrics import PARTS, RunMetrics
from torchmuster.monitor.metric import Metric, Sample
from torchmuster.runfolder import RunFolder, run_name

# More points than any view draws: of a longer curve, every n-th value stays.
MOST_POINTS = 500
# Larger values count as missing: they would flatten the rest of the curve.
_LARGEST = 1e100
# The curves: fields of the step lines.
CURVES = ("loss", "learning_rate", "samples_per_s", "tokens_per_s", "step_s")


class LongCurve:
    """Values over x, appended in order; NaN is a gap."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._each = 1
        self._count = 0

    def add(self, x: float, value: object) -> None:
        """Append a value."""
        number = math.nan
        if isinstance(value, int | float) and abs(value) <= _LARGEST:
            number = float(value)
        begins_gap = math.isnan(number) and bool(self.points) and math.isfinite(self.points[-1][1])
        if self._count % self._each == 0 or begins_gap:
            self.points.append((x, number))
        self._count += 1
        if len(self.points) > MOST_POINTS:
            self.points = self.points[::2]
            self._each *= 2

    @property
    def numbers(self) -> list[float]:
        """The finite values."""
        return [value for _, value in self.points if math.isfinite(value)]


@dataclass(frozen=True, kw_only=True)
class RunPicture:
    """The known state of a run at one moment."""

    id: str
    job: str
    phase: str
    headline: str
    lasts_s: float
    until_unix_s: float  # the time of this state: now, or the run's end
    values: Mapping[Metric, float]  # metrics with one value per run
    evaluation: Mapping[str, float]  # the last one
    remark: str  # remark of the last step line on the time breakdown, if any
    shares: Mapping[str, float]
    spent_s: Mapping[str, float]  # in steps that count, by category, since the start
    curves: Mapping[str, LongCurve]  # by field, over steps
    ranks: Sequence[tuple[str, Heartbeat]]  # with their hosts
    hang: str | None  # the reported hang of a run that is not over, in one line
    events: Sequence[run_state.RunEvent]  # the last of them
    alerts: Sequence[AlertNews]
    news: Sequence[AlertNews]  # since the last look

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
        self._watching = AlertWatch()

    def _forget(self) -> None:
        self._curves = {name: LongCurve() for name in CURVES}
        self._spent_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._last_step = 0
        self._remark = ""

    @property
    def is_behind(self) -> bool:
        """Whether the last poll left data unread."""
        return self._metrics.is_behind

    def catch_up(self, within_s: float) -> None:
        """Read the existing data before the first poll, for at most this time."""
        give_up_s = time.monotonic() + within_s
        self._metrics.catch_up()
        while self.is_behind and time.monotonic() < give_up_s:
            self._metrics.catch_up()

    def look(self, now_unix_s: float) -> RunPicture:
        """Return the current state of the run."""
        state = run_state.read_state(self._run)
        samples = list(self._metrics.samples(now_unix_s))
        nodes = node_records.read_node_ranks(self._run, now_unix_s)
        labels = (self._job, self._run.id)
        samples += [*collector.rank_number(nodes, labels), *collector.rank_samples(nodes, labels)]
        samples += _room(self._run)
        news = self._watching.look(samples, now_unix_s)
        until = now_unix_s if state is None or state.active else state.since_unix_s
        headline = state.headline if state else ""
        if state is not None and headline == state.phase:  # it says nothing more
            headline = ""
        return RunPicture(
            id=self._run.id,
            job=self._job,
            phase=state.phase if state else "submitted",
            headline=headline,
            lasts_s=max(0.0, until - state.started_unix_s) if state else 0.0,
            until_unix_s=until,
            values=_of_the_run(samples),
            evaluation={
                sample.labels[-1]: sample.value for sample in samples if sample.metric is EVALUATION
            },
            remark=self._remark,
            shares={
                sample.labels[-1]: sample.value for sample in samples if sample.metric is TIME_SHARE
            },
            spent_s=dict(self._spent_s),
            curves=self._curves,
            ranks=sorted(
                ((node.host, heartbeat) for node in nodes for heartbeat in node.ranks),
                key=lambda node: node[1].rank,
            ),
            hang=state.hang.text if state and state.active and state.hang else None,
            events=tuple(self._metrics.events.newest),
            # That a run has finished is news for a chat, and no alert where its phase is shown.
            alerts=[news for news in self._watching.raised if news.alert.name != RUN_FINISHED],
            news=news,
        )

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
            self._remark = str(line.get("verdict") or "")

    def _count_time(self, line: dict[str, Any], step: int) -> None:
        step_s = line.get("step_s")
        took_s = max(0, step - self._last_step) * _number(step_s)
        for part in PARTS:
            self._spent_s[part] += took_s * _number(line.get(f"{part}_share"))
        self._last_step = step


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _room(run: RunFolder) -> Iterator[Sample]:
    """Yield the free space on the run's disk, for users who run no exporter."""
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(run.path).free
        yield Sample(HOST_DISK_FREE, (socket.gethostname(),), float(free_bytes))


def _of_the_run(samples: Sequence[Sample]) -> dict[Metric, float]:
    return {
        sample.metric: sample.value
        for sample in samples
        if not sample.metric.labels and len(sample.labels) == 2
    }
