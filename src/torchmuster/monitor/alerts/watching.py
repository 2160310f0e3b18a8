"""The alerts without Prometheus: looked at again and again, told once when raised and once when over."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchmuster.monitor.alerts.expression import Over
from torchmuster.monitor.alerts.history import History, Labels
from torchmuster.monitor.alerts.rules import ALERTS, Alert
from torchmuster.monitor.metric import Metric, Sample


@dataclass(frozen=True, kw_only=True)
class News:
    """An alert that was raised, or is over, for one set of labels."""

    alert: Alert
    labels: Labels
    value: float
    raised: bool

    @property
    def summary(self) -> str:
        """What is the matter, in a sentence."""
        return self._filled(self.alert.summary)

    @property
    def fix(self) -> str:
        """What to do."""
        return self._filled(self.alert.fix)

    def _filled(self, text: str) -> str:
        known = {**dict(self.labels), "value": f"{self.value:.4g}"}
        return re.sub(r"\{([a-z_]+)\}", lambda found: known.get(found[1], found[0]), text)


class Watching:
    """Decides from one look to the next which alerts are to be told."""

    def __init__(self, alerts: Sequence[Alert] = ALERTS) -> None:
        self._alerts = alerts
        self._history = History(_kept(alerts))
        self._since: dict[tuple[str, Labels], float] = {}  # that a condition has held
        self._raised: dict[tuple[str, Labels], News] = {}

    @property
    def raised(self) -> list[News]:
        """The alerts that are raised now, in the order in which they were."""
        return list(self._raised.values())

    def look(self, samples: Iterable[Sample], now_s: float) -> list[News]:
        """Take in what is known now; return what is new: raised, or over."""
        self._history.add(samples, now_s)
        news: list[News] = []
        for alert in self._alerts:
            values = alert.condition.values(self._history)
            for labels, value in values.items():
                key = (alert.name, labels)
                since_s = self._since.setdefault(key, now_s)
                if now_s - since_s >= alert.for_s and key not in self._raised:
                    told = News(alert=alert, labels=labels, value=value, raised=True)
                    self._raised[key] = told
                    news.append(told)
            news += self._over(alert, set(values))
        return news

    def _over(self, alert: Alert, holds: set[Labels]) -> list[News]:
        gone = [key for key in self._since if key[0] == alert.name and key[1] not in holds]
        over = []
        for key in gone:
            del self._since[key]
            if (told := self._raised.pop(key, None)) is not None:
                over.append(News(alert=alert, labels=told.labels, value=told.value, raised=False))
        return over


def _kept(alerts: Sequence[Alert]) -> dict[Metric, float]:
    """Return the metrics that alerts are about, and how long each is looked back at."""
    kept: dict[Metric, float] = {}
    for alert in alerts:
        for metric in alert.condition.metrics():
            kept.setdefault(metric, 0.0)
        for part in _parts(alert.condition):
            if isinstance(part, Over):
                kept[part.metric] = max(kept.get(part.metric, 0.0), part.seconds)
    return kept


def _parts(expression: object) -> Iterable[object]:
    yield expression
    for inner in vars(expression).values():
        if hasattr(inner, "promql"):
            yield from _parts(inner)
