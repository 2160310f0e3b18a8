"""Alerts without Prometheus: reported once when raised and once when resolved."""

import json
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

from torchmuster.errors import Impossible
from torchmuster.monitor.alerts.expression import Labels, Over, SampleHistory
from torchmuster.monitor.alerts.rules import ALERTS, Alert
from torchmuster.monitor.metric import Metric, Sample


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
        value = {"value": f"{self.value:.4g}", "percent": f"{100 * self.value:.0f} %"}
        known = {**dict(self.labels), **value}
        return re.sub(r"\{([a-z_]+)\}", lambda found: known.get(found[1], found[0]), text)


class AlertWatch:
    """Decides at each evaluation which alerts to report."""

    def __init__(self, alerts: Sequence[Alert] = ALERTS) -> None:
        self._alerts = alerts
        self._history = SampleHistory(_kept(alerts))
        self._since: dict[tuple[str, Labels], float] = {}  # start of the time a condition has held
        self._raised: dict[tuple[str, Labels], AlertNews] = {}

    @property
    def raised(self) -> list[AlertNews]:
        """The alerts that are active now, in the order in which they were raised."""
        return list(self._raised.values())

    def look(self, samples: Iterable[Sample], now_s: float) -> list[AlertNews]:
        """Add the current samples; return the alerts that were raised or resolved."""
        self._history.add(samples, now_s)
        news: list[AlertNews] = []
        for alert in self._alerts:
            values = alert.condition.values(self._history)
            for labels, value in values.items():
                key = (alert.name, labels)
                since_s = self._since.setdefault(key, now_s)
                if now_s - since_s >= alert.for_s and key not in self._raised:
                    told = AlertNews(alert=alert, labels=labels, value=value, raised=True)
                    self._raised[key] = told
                    news.append(told)
            news += self._over(alert, set(values))
        return news

    def _over(self, alert: Alert, holds: set[Labels]) -> list[AlertNews]:
        gone = [key for key in self._since if key[0] == alert.name and key[1] not in holds]
        over = []
        for key in gone:
            del self._since[key]
            if (told := self._raised.pop(key, None)) is not None:
                over.append(
                    AlertNews(alert=alert, labels=told.labels, value=told.value, raised=False)
                )
        return over


def _kept(alerts: Sequence[Alert]) -> dict[Metric, float]:
    """Return the metrics that the alerts use, and how long each must be kept."""
    kept: dict[Metric, float] = {}
    for alert in alerts:
        for metric in alert.condition.metrics():
            kept.setdefault(metric, 0.0)
        for part in _watching_parts(alert.condition):
            if isinstance(part, Over):
                kept[part.metric] = max(kept.get(part.metric, 0.0), part.seconds)
    return kept


def _watching_parts(expression: object) -> Iterable[object]:
    yield expression
    for inner in vars(expression).values():
        if hasattr(inner, "promql"):
            yield from _watching_parts(inner)


_PATIENCE_S = 10.0
_TRIES = 3
_WAIT_S = 2.0  # before the second attempt; doubled before the third
_MOST_WAITING = 100
_LAST_WORDS_WITHIN_S = 30.0


def alert_text(news: AlertNews) -> str:
    """Return the text of an alert."""
    if not news.raised:
        return f"resolved: {news.summary}"
    return f"{news.alert.severity}: {news.summary}\n{news.alert.why}\nfix: {news.fix}"


class Webhook:
    """Posts alerts from a background thread.

    ``trouble`` is the last error, "" if there was none.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Impossible(
                "invalid webhook address: not a URL",
                fix="pass a URL that starts with https:// (or http://)",
            )
        self.trouble = ""
        self._waiting: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._post_all, name="webhook", daemon=True)

    def __enter__(self) -> "Webhook":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The last alerts of a run matter most: wait a little for them.
        self._put(None)
        self._thread.join(_LAST_WORDS_WITHIN_S)
        self._ended.set()

    def send(self, news: Iterable[AlertNews]) -> None:
        """Queue an alert for sending, without waiting."""
        for one in news:
            self._put(alert_text(one))

    def _put(self, text: str | None) -> None:
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self.trouble = "the webhook is too slow: some alerts were not sent"

    def _post_all(self) -> None:
        while (text := self._waiting.get()) is not None:
            self.trouble = self._post(text)

    def _post(self, text: str) -> str:
        """Post a text with retries; return the last error, or an empty text."""
        body = json.dumps({"text": text}).encode()
        # The constructor checked the scheme.
        request = urllib.request.Request(  # noqa: S310
            self.address, data=body, headers={"Content-Type": "application/json"}
        )
        trouble = ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_WAIT_S * attempt)
            try:
                with urllib.request.urlopen(request, timeout=_PATIENCE_S):  # noqa: S310
                    return ""
            except urllib.error.HTTPError as error:
                trouble = f"the webhook answered {error.code} {error.reason}"
                if 400 <= error.code < 500:
                    break  # a retry would give the same answer
            except (OSError, ValueError) as error:
                # Not the address itself: it is a secret.
                trouble = f"the webhook cannot be reached ({type(error).__name__})"
        return f"alerts were not sent: {trouble}"
