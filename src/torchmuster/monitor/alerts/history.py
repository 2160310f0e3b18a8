"""The samples of the last while, as much of them as conditions look at."""

from collections import deque
from collections.abc import Iterable, Mapping

from torchmuster.monitor.metric import Metric, Sample

Labels = tuple[tuple[str, str], ...]  # (name, value), in the order of the metric's labels


class History:
    """Keeps samples of some metrics for some time."""

    def __init__(self, keep_s: Mapping[Metric, float]) -> None:
        """Keep each of these metrics for so long; 0 keeps the newest only. Others are not kept."""
        self._keep_s = keep_s
        self._kept: dict[Metric, dict[Labels, deque[tuple[float, float]]]] = {}
        self._now_s = 0.0

    def add(self, samples: Iterable[Sample], now_s: float) -> None:
        """Add everything that is known now; a series that is not among it has ended."""
        self._now_s = now_s
        for sample in samples:
            if sample.metric in self._keep_s:
                labels = tuple(zip(sample.metric.all_labels, sample.labels, strict=True))
                series = self._kept.setdefault(sample.metric, {})
                series.setdefault(labels, deque()).append((now_s, sample.value))
        for metric, series in self._kept.items():
            oldest_s = now_s - self._keep_s[metric]
            for labels in list(series):
                values = series[labels]
                while values and values[0][0] < oldest_s:
                    values.popleft()
                if not values:
                    del series[labels]

    def now(self, metric: Metric) -> dict[Labels, float]:
        """Return the newest values."""
        found = self._kept.get(metric, {})
        return {
            labels: values[-1][1]
            for labels, values in found.items()
            if values[-1][0] == self._now_s
        }

    def lately(self, metric: Metric, seconds: float) -> dict[Labels, list[float]]:
        """Return the values of the last so many seconds."""
        since_s = self._now_s - seconds
        found = self._kept.get(metric, {})
        return {
            labels: lately
            for labels, values in found.items()
            if (lately := [value for at_s, value in values if at_s >= since_s])
        }
