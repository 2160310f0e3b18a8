"""News sent to an address, in the form that Slack and many others take; who listens there never holds up the watching."""

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from types import TracebackType
from urllib.parse import urlsplit

from torchmuster.errors import Impossible
from torchmuster.monitor.alerts.watching import News

_PATIENCE_S = 10.0
_TRIES = 3
_WAIT_S = 2.0  # before the second try; twice that before the third
_MOST_WAITING = 100
_LAST_WORDS_WITHIN_S = 30.0


def text_of(news: News) -> str:
    """Return what is said of an alert."""
    if not news.raised:
        return f"over: {news.summary}"
    return f"{news.alert.severity}: {news.summary}\n{news.alert.why}\nfix: {news.fix}"


class Webhook:
    """Posts news in a thread of its own; ``trouble`` says what went wrong last, "" if nothing did."""

    def __init__(self, address: str) -> None:
        if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
            raise Impossible(
                "news cannot be sent there: that is no address of the web",
                fix="give --webhook an address that begins with https:// (or http://)",
            )
        self._address = address
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
        # What a run said last is what people wait for: it is given some time.
        self._put(None)
        self._thread.join(_LAST_WORDS_WITHIN_S)
        self._ended.set()

    def send(self, news: Iterable[News]) -> None:
        """Send, without waiting for anybody."""
        for one in news:
            self._put(text_of(one))

    def _put(self, text: str | None) -> None:
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self.trouble = "nobody takes the news there: some were not sent"

    def _post_all(self) -> None:
        while (text := self._waiting.get()) is not None:
            self.trouble = self._post(text)

    def _post(self, text: str) -> str:
        """Post a text, again if need be; return what went wrong at last."""
        body = json.dumps({"text": text}).encode()
        # The scheme was looked at when it was made.
        request = urllib.request.Request(  # noqa: S310
            self._address, data=body, headers={"Content-Type": "application/json"}
        )
        trouble = ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_WAIT_S * attempt)
            try:
                with urllib.request.urlopen(request, timeout=_PATIENCE_S):  # noqa: S310
                    return ""
            except urllib.error.HTTPError as error:
                trouble = f"the address answers {error.code} {error.reason}"
                if 400 <= error.code < 500:
                    break  # it will not like it better the next time
            except (OSError, ValueError) as error:
                # Not the address itself: it is a secret.
                trouble = f"the address cannot be reached ({type(error).__name__})"
        return f"news were not sent: {trouble}"
