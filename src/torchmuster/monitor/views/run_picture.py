"""A run as it is now: what a view of it shows, apart from how it shows it."""

import contextlib
import math
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.launch import ledger, node_ranks
from torchmuster.launch.hangs.pulse import Pulse
from torchmuster.monitor.alerts.watching import News, Watching
from torchmuster.monitor.catalogue import HOST_DISK_FREE, TIME_SHARE
from torchmuster.monitor.collecting import rank_metrics
from torchmuster.monitor.collecting.growing_file import GrowingFile
from torchmuster.monitor.collecting.run_metrics import RunMetrics
from torchmuster.monitor.metric import Metric, Sample
from torchmuster.runfolder import RunFolder, name_of

# A curve has a few hundred places at most; what is older is kept more and more coarsely.
_MOST_POINTS = 4096


@dataclass(frozen=True, kw_only=True)
class RunPicture:
    """What is known of a run at one moment."""

    id: str
    job: str
    phase: str
    headline: str
    lasts_s: float
    values: Mapping[Metric, float]  # of metrics that the run has one of
    shares: Mapping[str, float]
    losses: Sequence[float]
    speeds: Sequence[float]  # samples a second
    ranks: Sequence[tuple[str, Pulse]]  # with their hosts
    alerts: Sequence[News]
    news: Sequence[News]  # since the last look

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.phase not in ledger.ACTIVE


class RunWatch:
    """Looks at one run, again and again."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._job = name_of(run)
        self._metrics = RunMetrics(run, self._job)
        self._steps = GrowingFile(run.metrics / "steps.jsonl")
        self._losses = Curve()
        self._speeds = Curve()
        self._watching = Watching()

    def look(self, now_unix_s: float) -> RunPicture:
        """Return what the run is like now."""
        state = ledger.read_state(self._run)
        samples = list(self._metrics.samples(now_unix_s))
        samples += rank_metrics.samples(self._run, self._job, now_unix_s)
        samples += _room(self._run)
        news = self._watching.look(samples, now_unix_s)
        self._catch_up()
        until = now_unix_s if state is None or state.active else state.since_unix_s
        return RunPicture(
            id=self._run.id,
            job=self._job,
            phase=state.phase if state else "submitted",
            headline=state.headline if state else "",
            lasts_s=max(0.0, until - state.started_unix_s) if state else 0.0,
            values=_of_the_run(samples),
            shares={one.labels[-1]: one.value for one in samples if one.metric is TIME_SHARE},
            losses=self._losses.values,
            speeds=self._speeds.values,
            ranks=sorted(
                (
                    (node.host, pulse)
                    for node in node_ranks.read(self._run, now_unix_s)
                    for pulse in node.ranks
                ),
                key=lambda one: one[1].rank,
            ),
            alerts=self._watching.raised,
            news=news,
        )

    def _catch_up(self) -> None:
        anew, lines = self._steps.new_lines()
        if anew:
            self._losses, self._speeds = Curve(), Curve()
        for line in lines:
            self._losses.add(line.get("loss"))
            self._speeds.add(line.get("samples_per_s"))


class Curve:
    """Values one after the other; where they become too many, neighbours become their mean."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._each = 1  # so many values are one of the curve
        self._waiting: list[float] = []

    def add(self, value: object) -> None:
        """Add a value; what is no number is a gap."""
        self._waiting.append(float(value) if isinstance(value, int | float) else math.nan)
        if len(self._waiting) < self._each:
            return
        self.values.append(_mean(self._waiting))
        self._waiting.clear()
        if len(self.values) >= _MOST_POINTS:
            self.values = [_mean(self.values[at : at + 2]) for at in range(0, _MOST_POINTS, 2)]
            self._each *= 2


def _mean(values: Sequence[float]) -> float:
    numbers = [one for one in values if math.isfinite(one)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _room(run: RunFolder) -> Iterator[Sample]:
    """Yield how much room there is on the run's disk, as who runs no exporter is told of it here alone."""
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(run.path).free
        yield Sample(HOST_DISK_FREE, (socket.gethostname(),), float(free_bytes))


def _of_the_run(samples: Sequence[Sample]) -> dict[Metric, float]:
    return {
        one.metric: one.value for one in samples if not one.metric.labels and len(one.labels) == 2
    }
