"""Alerts without Prometheus: reported once when raised and once when resolved."""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from torchmuster.monitor.alerts import ALERTS, WINDOWS_S, Alert, History, Labels, Series
from torchmuster.monitor.metric import Sample


@dataclass(frozen=True, kw_only=True)
class AlertNews:
    """An alert that was raised or resolved, for one label set."""

    alert: Alert
    labels: Labels
    value: float
    raised: bool

    @property
    def summary(self) -> str:
        """The problem, in one sentence."""
        return self._filled(self.alert.summary)

    @property
    def fix(self) -> str:
        """How to fix it."""
        return self._filled(self.alert.fix)

    def _filled(self, text: str) -> str:
        values = {
            **dict(self.labels),
            "value": f"{self.value:.4g}",
            "percent": f"{100 * self.value:.0f} %",
        }
        return re.sub(r"\{([a-z_]+)\}", lambda match: values.get(match[1], match[0]), text)


class AlertWatch:
    """Decides at each evaluation which alerts to report."""

    def __init__(self) -> None:
        self._history = History()
        self._since: dict[tuple[str, Labels], float] = {}  # start of the time a condition has held
        self._raised: dict[tuple[str, Labels], AlertNews] = {}

    @property
    def raised(self) -> list[AlertNews]:
        """The alerts that are active now, in the order in which they were raised."""
        return list(self._raised.values())

    def look(self, samples: Iterable[Sample], now_s: float) -> list[AlertNews]:
        """Add the current samples; return the alerts that were raised or resolved."""
        self._remember(samples, now_s)
        news: list[AlertNews] = []
        for alert in ALERTS:
            holds = set()
            for labels, value in self._history.now.get(alert.metric, {}).items():
                series = Series(alert.metric, labels, value, self._history)
                if not alert.when(series, alert.limit):
                    continue
                holds.add(labels)
                key = (alert.name, labels)
                since_s = self._since.setdefault(key, now_s)
                if now_s - since_s >= alert.for_s and key not in self._raised:
                    value = alert.shown(series)
                    raised = AlertNews(alert=alert, labels=labels, value=value, raised=True)
                    self._raised[key] = raised
                    news.append(raised)
            news += self._resolve(alert, holds)
        return news

    def _remember(self, samples: Iterable[Sample], now_s: float) -> None:
        history = self._history
        history.now = {}
        for sample in samples:
            metric = sample.metric
            labels = tuple(zip(metric.all_labels, sample.labels, strict=True))
            history.now.setdefault(metric, {})[labels] = sample.value
            if metric in WINDOWS_S:
                series = history.recent.setdefault((metric, labels), deque())
                series.append((now_s, sample.value))
        for key in list(history.recent):
            series = history.recent[key]
            while series and series[0][0] < now_s - WINDOWS_S[key[0]]:
                series.popleft()
            if not series:
                del history.recent[key]

    def _resolve(self, alert: Alert, holds: set[Labels]) -> list[AlertNews]:
        resolved = []
        for key in list(self._since):
            name, labels = key
            if name != alert.name or labels in holds:
                continue
            del self._since[key]
            raised = self._raised.pop(key, None)
            if raised is not None:
                resolved.append(
                    AlertNews(alert=alert, labels=labels, value=raised.value, raised=False)
                )
        return resolved
