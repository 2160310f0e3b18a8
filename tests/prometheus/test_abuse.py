"""Silent clients of the exporter of a real run keep nobody out, and the run does not notice its end."""

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


def test_a_run_whose_exporter_is_misused_and_killed(own_machine: Path) -> None:
    folder = own_machine
    with (
        exporter(folder) as (port, started),
        training(folder) as it,
        contextlib.ExitStack() as stack,
    ):
        before = it.lines()
        for _ in range(20):  # these say nothing, and keep their connection
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        rounds = 0
        while rounds < 20 or it.lines() < before + 50:
            rounds += 1
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


def _served(port: int) -> Callable[[], bool]:
    def ask() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            return answer.status == 200 and b"muster_train_loss" in answer.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    return ask
