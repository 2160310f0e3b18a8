"""A real Prometheus and a real Alertmanager on free ports, and somebody who hears alerts."""

import json
import queue
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from faster_alerts import RULES, write_faster_rules
from free_port import free_port
from patience import GIVE_UP_S

PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager")
INSTALL = "apt-get install prometheus prometheus-alertmanager"


def missing() -> list[str]:
    """Return the programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def await_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline, f"did not come: {what}"
        time.sleep(0.2)


@dataclass
class Heard:
    """The alerts that arrived at a webhook."""

    address: str
    posts: "queue.Queue[dict[str, Any]]" = field(default_factory=queue.Queue)

    def next_alert(self, name: str) -> dict[str, Any]:
        """Wait for an alert of this name."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            post = self.posts.get(timeout=max(0.1, deadline - time.monotonic()))
            for alert in post["alerts"]:
                if alert["labels"]["alertname"] == name:
                    return dict(alert)


@contextmanager
def webhook() -> Iterator[Heard]:
    """Listen for alerts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            heard.posts.put(json.loads(self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    heard = Heard(f"http://127.0.0.1:{server.server_address[1]}/")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True)
class Prometheus:
    """A server that answers queries."""

    address: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that an expression gives now."""
        words = urllib.parse.urlencode({"query": expression})
        asked = f"{self.address}/api/v1/query?{words}"
        with urllib.request.urlopen(asked, timeout=GIVE_UP_S) as answer:
            found = json.load(answer)
        return list(found["data"]["result"])

    def firing(self) -> set[str]:
        """Return the names of the alerts that are raised now."""
        found = self.query('ALERTS{alertstate="firing"}')
        return {one["metric"]["alertname"] for one in found}

    def names(self) -> set[str]:
        """Return the names of all metrics that were ever there."""
        with urllib.request.urlopen(f"{self.address}/api/v1/label/__name__/values") as answer:
            return set(json.load(answer)["data"])


@contextmanager
def prometheus(
    folder: Path, exporters: list[int], *, alerts_to: str | None = None, speed: float = 1.0
) -> Iterator[Prometheus]:
    """Run Prometheus with the shipped rules, and an Alertmanager if alerts go somewhere.

    With ``speed`` the same rules are evaluated with all their times divided.
    """
    rules = RULES
    if speed != 1.0:
        rules = folder / "faster-rules.yml"
        write_faster_rules(rules, speed)
    with ExitStack() as stack:
        config: dict[str, Any] = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {
                    "job_name": "torchmuster",
                    "honor_labels": True,
                    "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in exporters]}],
                }
            ],
        }
        if alerts_to is not None:
            manager = stack.enter_context(_alertmanager(folder, alerts_to))
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]}
        path = folder / "prometheus.yml"
        path.write_text(json.dumps(config))
        port = free_port()
        command = ["prometheus", f"--config.file={path}", f"--web.listen-address=127.0.0.1:{port}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=error"]
        address = f"http://127.0.0.1:{port}"
        stack.enter_context(_running(command, f"{address}/-/ready"))
        yield Prometheus(address)


@contextmanager
def _alertmanager(folder: Path, alerts_to: str) -> Iterator[str]:
    config = {
        "route": {"receiver": "test", "group_wait": "0s", "group_interval": "1s"},
        "receivers": [{"name": "test", "webhook_configs": [{"url": alerts_to}]}],
    }
    path = folder / "alertmanager.yml"
    path.write_text(json.dumps(config))
    port = free_port()
    command = ["prometheus-alertmanager", f"--config.file={path}", "--cluster.listen-address="]
    command += [f"--web.listen-address=127.0.0.1:{port}", f"--storage.path={folder / 'alerts'}"]
    with _running([*command, "--log.level=error"], f"http://127.0.0.1:{port}/-/ready"):
        yield f"127.0.0.1:{port}"


@contextmanager
def _running(command: list[str], ready: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        assert process.poll() is None, f"{command[0]} has ended"
        try:
            with urllib.request.urlopen(ready, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    try:
        await_until(answers, f"{command[0]} is ready")
        yield
    finally:
        process.terminate()
        process.wait(GIVE_UP_S)
