"""``--webhook URL``: one JSON POST when a run starts, when an attempt fails, and when the run ends.

A chat or an own service receives, for example::

    {"event": "ended", "run": "20260131-1200-train-1a2b", "name": "train", "host": "gpu7",
     "phase": "failed", "exit_code": 1, "text": "train: rank 1 failed: ValueError", "unix_s": 1769860800.0}

``event`` is ``started``, ``failed`` (a restart follows) or ``ended``. ``text`` is what Slack and
compatible services show.
"""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from torchmuster.errors import Impossible
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


class Webhook:
    """Posts the events of a run, each from a thread; a run never waits for it.

    ``problem`` is the last error, "" if there was none.
    """

    def __init__(self, url: str, run: RunFolder, name: str) -> None:
        check_address(url)
        self.problem = ""
        self._url, self._run, self._name = url, run, name
        self._threads: list[threading.Thread] = []

    def post(self, event: str, headline: str, **facts: object) -> None:
        """Post an event in the background."""
        first_line = headline.partition("\n")[0]
        content = {
            "event": event,
            "run": self._run.id,
            "name": self._name,
            "host": socket.gethostname(),
            **facts,
            "text": redact_text(f"{self._name}: {first_line}")[:_LONGEST_TEXT],
            "unix_s": time.time(),
        }
        data = json.dumps(content).encode()
        self._threads.append(threading.Thread(target=self._send, args=(data,), daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Wait at most 8 s for what is not sent yet."""
        end_s = time.monotonic() + _END_WITHIN_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
            if thread.is_alive():
                self.problem = "the webhook does not answer"

    def _send(self, data: bytes) -> None:
        # The scheme was checked.
        request = urllib.request.Request(  # noqa: S310
            self._url, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_POST_WITHIN_S):  # noqa: S310
                pass
        except urllib.error.HTTPError as error:
            self.problem = f"the webhook answered {error.code}"
        except Exception as error:  # whatever it is, the run continues; the address is a secret
            self.problem = f"the webhook cannot be reached ({type(error).__name__})"
