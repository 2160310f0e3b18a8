"""A run as it is now: what a view of it shows, apart from how it shows it."""

import contextlib
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.launch.hangs.heartbeat import Pulse
from torchmuster.launch.history import node_ranks, run_state
from torchmuster.monitor.alerts.watching import News, Watching
from torchmuster.monitor.catalogue import EVALUATION, HOST_DISK_FREE, TIME_SHARE
from torchmuster.monitor.collecting import rank_metrics
from torchmuster.monitor.collecting.growing_file import GrowingFile
from torchmuster.monitor.collecting.run_metrics import PARTS, RunMetrics
from torchmuster.monitor.metric import Metric, Sample
from torchmuster.monitor.views.long_curve import LongCurve
from torchmuster.runfolder import RunFolder, name_of

# What a curve is drawn of: fields of the lines about steps.
CURVES = ("loss", "learning_rate", "samples_per_s", "tokens_per_s", "step_s")
_MOST_EVENTS = 200


@dataclass(frozen=True, kw_only=True)
class RunPicture:
    """What is known of a run at one moment."""

    id: str
    job: str
    phase: str
    headline: str
    lasts_s: float
    until_unix_s: float  # what it shows is of then: now, or the run's end
    heard_s: float | None  # how long ago something was heard of it; None: never
    values: Mapping[Metric, float]  # of metrics that the run has one of
    evaluation: Mapping[str, float]  # the last one
    remark: str  # what the last line says of the time, if anything is worth a word
    shares: Mapping[str, float]
    spent_s: Mapping[str, float]  # in steps that count, by part of the time, since the start
    curves: Mapping[str, LongCurve]  # by field, over steps
    ranks: Sequence[tuple[str, Pulse]]  # with their hosts
    events: Sequence[run_state.Event]  # the last of them
    alerts: Sequence[News]
    news: Sequence[News]  # since the last look

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.phase not in run_state.ACTIVE


class RunWatch:
    """Looks at one run, again and again."""

    def __init__(
        self, run: RunFolder, *, on_line: Callable[[dict[str, Any]], None] = lambda line: None
    ) -> None:
        """Look at a run; ``on_line`` is told of each line about steps."""
        self._run = run
        self._job = name_of(run)
        self._metrics = RunMetrics(run, self._job, on_steps=self._take_in)
        self._on_line = on_line
        self._forget()
        self._events_file = GrowingFile(run.path / run_state.EVENTS)
        self._events: deque[run_state.Event] = deque(maxlen=_MOST_EVENTS)
        self._watching = Watching()

    def _forget(self) -> None:
        self._curves = {name: LongCurve() for name in CURVES}
        self._spent_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._last_step = 0
        self._remark = ""

    @property
    def is_behind(self) -> bool:
        """Whether there was too much to be read in one look."""
        return self._metrics.is_behind

    def catch_up(self, within_s: float) -> None:
        """Read all that there is before the first look, or as much as can be read within this time."""
        give_up_s = time.monotonic() + within_s
        self._metrics.catch_up()
        while self.is_behind and time.monotonic() < give_up_s:
            self._metrics.catch_up()

    def look(self, now_unix_s: float) -> RunPicture:
        """Return what the run is like now."""
        state = run_state.read_state(self._run)
        samples = list(self._metrics.samples(now_unix_s))
        nodes = node_ranks.read(self._run, now_unix_s)
        labels = (self._job, self._run.id)
        samples += [*rank_metrics.number(nodes, labels), *rank_metrics.samples(nodes, labels)]
        samples += _room(self._run)
        news = self._watching.look(samples, now_unix_s)
        self._follow_events()
        until = now_unix_s if state is None or state.active else state.since_unix_s
        heard = self._heard_unix_s(nodes)
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
                ((node.host, pulse) for node in nodes for pulse in node.ranks),
                key=lambda one: one[1].rank,
            ),
            events=tuple(self._events),
            alerts=self._watching.raised,
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
                curve.add(step, line.get(name))
            self._count_time(line, step)
            self._remark = str(line.get("verdict") or "")
            self._on_line(line)

    def _count_time(self, line: dict[str, Any], step: int) -> None:
        step_s = line.get("step_s")
        took_s = max(0, step - self._last_step) * _number(step_s)
        for part in PARTS:
            self._spent_s[part] += took_s * _number(line.get(f"{part}_share"))
        self._last_step = step

    def _follow_events(self) -> None:
        anew, lines = self._events_file.new_lines()
        if anew:
            self._events.clear()
        self._events.extend(event for line in lines if (event := run_state.event_of(line)))

    def _heard_unix_s(self, nodes: Sequence[node_ranks.NodeRanks]) -> float | None:
        """Return when the launcher, the first rank or a machine last wrote something."""
        heard = [node.at_unix_s for node in nodes]
        if self._metrics.changed_unix_s is not None:
            heard.append(self._metrics.changed_unix_s)
        with contextlib.suppress(OSError):
            heard.append(self._run.state.stat().st_mtime)
        return max(heard, default=None)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _room(run: RunFolder) -> Iterator[Sample]:
    """Yield how much room there is on the run's disk, as who runs no exporter is told of it here alone."""
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(run.path).free
        yield Sample(HOST_DISK_FREE, (socket.gethostname(),), float(free_bytes))


def _of_the_run(samples: Sequence[Sample]) -> dict[Metric, float]:
    return {
        one.metric: one.value for one in samples if not one.metric.labels and len(one.labels) == 2
    }
