"""Whoever misuses the exporter of a real run is refused, others are served meanwhile, and the run does not notice."""

import contextlib
import http.client
import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from patience import GIVE_UP_S
from prometheus.prometheus_lab import await_until
from prometheus.watched_training import exporter, training
from torchmuster.errors import ExitCode

pytestmark = pytest.mark.nightly

TOKEN = "a-token-that-is-long-enough"
KNOWS_IT = f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
REFUSED = {
    "wrong Host": (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    "cross-site": (
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\n\r\n",
        403,
    ),
    "traversal": (b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n" + KNOWS_IT, 404),
    "huge path": (b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
    "huge header": (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        431,
    ),
    "to write": (b"PUT /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
    "no token": (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 401),
    "wrong token": (
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n\r\n",
        401,
    ),
}


def test_a_run_whose_exporter_is_misused_and_killed(own_machine: Path) -> None:
    folder = own_machine
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    with (
        exporter(folder, flags=("--token-file", "token")) as (port, started),
        training(folder) as it,
        contextlib.ExitStack() as stack,
    ):
        before = it.lines()
        # Some take places and say nothing; who comes later gets one of those that are left.
        for _ in range(4):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        rounds = 0
        while rounds < 20 or it.lines() < before + 50:
            rounds += 1
            for name, (words, status) in REFUSED.items():
                # Of what is too long the rest is not read, and then an answer may be lost with the connection.
                allowed = (status, None) if name.startswith("huge") else (status,)
                assert _status(port, words) in allowed, name
            await_until(_served(port), "an honest question is answered")
        assert started.poll() is None
        assert it.process.poll() is None
        started.kill()
        started.wait()
        watched = it.lines()
        await_until(lambda: it.lines() > watched + 50, "steps that nobody watches")
        it.process.send_signal(signal.SIGUSR1)
        assert it.process.wait(GIVE_UP_S) == ExitCode.SAVED, (folder / "train.txt").read_text()
    lines = (it.run.metrics / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))


def _status(port: int, words: bytes) -> int | None:
    with socket.create_connection(("127.0.0.1", port), timeout=GIVE_UP_S) as client:
        heard = b""
        with contextlib.suppress(ConnectionError):
            client.sendall(words)
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(65536):
                heard += piece
    assert b"muster_" not in heard
    return int(heard.split()[1]) if heard else None


def _served(port: int) -> Callable[[], bool]:
    def ask() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
        try:
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            return answer.status == 200 and b"muster_train_loss" in answer.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    return ask
