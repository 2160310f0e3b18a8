"""News arrive where they are sent; an address that fails is told of and harms nobody."""

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.monitor.alerts import watching
from torchmuster.monitor.alerts.rules import ALERTS
from torchmuster.monitor.alerts.watching import AlertNews, Webhook

(FAILED,) = (one for one in ALERTS if one.name == "MusterRunFailed")
LABELS = (("job", "llm"), ("run", "r1"), ("phase", "failed"))
NEWS = AlertNews(alert=FAILED, labels=LABELS, value=1.0, raised=True)


class Listener:
    """A server that keeps what is posted to it, and answers with a number from a list."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.heard: queue.Queue[str] = queue.Queue()
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.heard.put(json.loads(body)["text"])
                self.send_response(listener.answers.pop(0) if listener.answers else 200)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/secret"


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_WAIT_S", 0.0)
    monkeypatch.setattr(watching, "_PATIENCE_S", GIVE_UP_S)
    monkeypatch.setattr(watching, "_LAST_WORDS_WITHIN_S", GIVE_UP_S)


def test_news_are_posted_with_their_fix(listener: Listener, snapshot: SnapshotAssertion) -> None:
    with Webhook(listener.address) as hook:
        hook.send([NEWS])
    heard = listener.heard.get_nowait()
    assert heard.startswith("critical: llm: ")
    assert heard.endswith("fix: muster explain r1")
    assert heard == snapshot
    assert hook.trouble == ""


def test_a_server_that_stumbles_is_asked_again(listener: Listener) -> None:
    listener.answers = [500, 503]
    with Webhook(listener.address) as hook:
        hook.send([NEWS])
    assert listener.heard.qsize() == 3
    assert hook.trouble == ""


def test_a_refusal_is_told(listener: Listener) -> None:
    listener.answers = [404]
    with Webhook(listener.address) as hook:
        hook.send([NEWS])
    assert "404" in hook.trouble


def test_nobody_there_is_told_without_the_address() -> None:
    with Webhook("http://127.0.0.1:1/secret") as hook:
        hook.send([NEWS])
    assert "cannot be reached" in hook.trouble
    assert "secret" not in hook.trouble


@pytest.mark.parametrize(
    "address", ["file:///etc/passwd", "hooks.example", "ftp://x/y", "https://"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(Impossible, match="not a URL"):
        Webhook(address)
