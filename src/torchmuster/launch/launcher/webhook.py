"""``--webhook URL``: one JSON POST when a run starts, when an attempt fails, and when the run ends.

A chat or an own service receives, for example::

    {"event": "ended", "run": "20260131-1200-train-1a2b", "name": "train", "host": "gpu7",
     "phase": "failed", "exit_code": 1, "text": "train: rank 1 failed: ValueError", "unix_s": 1769860800.0}

``event`` is ``started``, ``failed`` (a restart follows) or ``ended``. ``text`` is what Slack and
compatible services show.
"""

import json
import queue
import socket
import threading
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from torchmuster.errors import Impossible
from torchmuster.launch.history import run_state
from torchmuster.redaction import redact_text
from torchmuster.runfolder import RunFolder

_POST_WITHIN_S = 5.0
_END_WITHIN_S = 8.0
_LONGEST_TEXT = 500


def check_address(url: str) -> None:
    """Raise if a URL cannot be used."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise Impossible(
            "--webhook: the address is not an http or https URL",  # not the address: it is secret
            fix="give a URL that starts with https:// (or http://)",
        )


class RunWebhook:
    """Posts the events of a run from a background thread; a run never waits for it.

    Use as a context around the run. ``problem`` is the last error, "" if there was none.
    """

    def __init__(self, url: str, run: RunFolder, name: str) -> None:
        check_address(url)
        self.problem = ""
        self._url, self._run, self._name = url, run, name
        self._is_started = False
        self._failures = 0
        self._events: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._post_all, name="webhook", daemon=True)

    def __enter__(self) -> "RunWebhook":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Post how the run ended; wait at most 8 s for what is not sent yet."""
        state = run_state.read_state(self._run)
        if state is None or state.active:
            self._post_later("ended", "ended")
        else:
            self._post_later("ended", state.headline, phase=state.phase, exit_code=state.exit_code)
        self._events.put(None)
        self._thread.join(_END_WITHIN_S)
        if self._thread.is_alive():
            self.problem = "the webhook does not answer"

    def on_phase(self, phase: str) -> None:
        """Post the start of the run, or the failure after which it starts again."""
        if phase == "running" and not self._is_started:
            self._is_started = True
            self._post_later("started", "started")
        elif phase == "starting" and self._is_started:
            restarts = [
                event
                for event in run_state.read_events(self._run)
                if event.name == run_state.RESTART
            ]
            if len(restarts) > self._failures:
                self._failures = len(restarts)
                headline = str(restarts[-1].facts.get("headline", ""))
                self._post_later("failed", f"restarts after a failure: {headline}")

    def _post_later(self, event: str, headline: str, **facts: object) -> None:
        first_line = headline.partition("\n")[0]
        text = redact_text(f"{self._name}: {first_line}")[:_LONGEST_TEXT]
        self._events.put(
            {
                "event": event,
                "run": self._run.id,
                "name": self._name,
                "host": socket.gethostname(),
                **facts,
                "text": text,
                "unix_s": time.time(),
            }
        )

    def _post_all(self) -> None:
        while True:
            event = self._events.get()
            if event is None:
                return
            self._post(event)

    def _post(self, event: dict[str, object]) -> None:
        # The scheme was checked.
        request = urllib.request.Request(  # noqa: S310
            self._url,
            data=json.dumps(event).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_POST_WITHIN_S):  # noqa: S310
                pass
        except urllib.error.HTTPError as error:
            self.problem = f"the webhook answered {error.code}"
        except Exception as error:  # whatever it is, the run continues; the address is a secret
            self.problem = f"the webhook cannot be reached ({type(error).__name__})"
