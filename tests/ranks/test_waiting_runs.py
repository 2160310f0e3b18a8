"""Runs that wait in line for GPUs, time limits and webhooks, with real runs."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from muster_command import Muster
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from torchmuster.devices import snapshot
from torchmuster.devices.acquire import HeldDevices, acquire_devices
from torchmuster.devices.claims import Claims
from torchmuster.devices.request import DeviceRequest
from torchmuster.devices.tickets import read_tickets
from torchmuster.launch.history import run_state
from torchmuster.runfolder import RunFolder

SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", sys.argv[1:], flush=True)
"""
UNTIL_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(600)
"""
FAILS_ONCE = """
import pathlib
mark = pathlib.Path("failed-before")
if not mark.exists():
    mark.touch()
    raise ValueError("token=hf_abcdefghijklmnopqrstuvwxyz012345")
"""


@pytest.fixture
def place(machine: Callable[[Scenario], Path], own_machine: Path) -> Iterator[Path]:
    machine(scenarios.eight_a100_idle())
    (own_machine / "hello.py").write_text(SCRIPT)
    yield own_machine
    for folder in (own_machine / "runs").glob("*"):  # what a failed test left
        job = run_state.read_job(RunFolder(folder))
        process = None if job is None else job.launcher.process()
        if process is not None:
            process.terminate()
            process.wait(GIVE_UP_S)


def all_gpus(place: Path) -> HeldDevices:
    """Hold all GPUs in this process."""
    return acquire_devices(
        Claims(place / "claims"),
        snapshot.take_snapshot,
        DeviceRequest(count=8),
        environment={},
        command=["another program"],
    )


def start(muster: Muster, place: Path, *words: str) -> RunFolder:
    done = muster("run", "--detach", "--wait", "--num-gpus", "1", *words)
    assert done.code == 0, done.err
    return RunFolder(place / "runs" / done.out.strip())


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def phase(run: RunFolder) -> str:
    state = run_state.read_state(run)
    return "" if state is None else state.phase


def wait_for_tickets(place: Path, count: int) -> None:
    wait_until(lambda: len(read_tickets(place / "claims" / "queue")) == count)


def test_waiting_runs_are_listed_and_start_in_the_order_of_their_arrival(
    muster: Muster, place: Path
) -> None:
    with all_gpus(place):
        first = start(muster, place, "hello.py")
        wait_for_tickets(place, 1)
        second = start(muster, place, "hello.py")
        wait_for_tickets(place, 2)
        rows = {row["id"]: row for row in json.loads(muster("runs", "--json").out)}
        assert rows[first.id]["phase"] == "waiting"
        assert rows[second.id]["phase"] == "waiting"
        assert muster("gpus").out.count("waiting: ") == 2
    wait_until(lambda: phase(first) == phase(second) == "finished")
    assert "waiting: " not in muster("gpus").out


def test_stop_cancels_a_waiting_run(muster: Muster, place: Path) -> None:
    with all_gpus(place):
        run = start(muster, place, "hello.py")
        wait_for_tickets(place, 1)
        assert muster("stop", run.id).code == 0
        assert phase(run) == "stopped"
        wait_for_tickets(place, 0)


def test_a_script_after_wait_is_not_its_duration(muster: Muster, place: Path) -> None:
    refused = muster("run", "--num-gpus", "1", "--wait", "./train.sh")
    assert "there is no script './train.sh'" in refused.err
    for words in (["--wait=1m", "hello.py"], ["--wait", "hello.py"]):
        done = muster("run", "--num-gpus", "1", *words)
        assert done.code == 0, done.err


def test_a_time_limit_stops_the_run(muster: Muster, place: Path) -> None:
    (place / "long.py").write_text(UNTIL_SIGTERM)
    run = start(muster, place, "--time-limit", "10s", "--set", "launch.grace=5s", "long.py")
    wait_until(lambda: phase(run) == "stopped")
    state = run_state.read_state(run)
    assert state is not None
    assert "time limit" in state.headline
    assert "time-limit" in [event.name for event in run_state.read_events(run)]


def test_a_webhook_gets_the_start_a_failure_and_the_end(muster: Muster, place: Path) -> None:
    (place / "fails_once.py").write_text(FAILS_ONCE)
    with hook() as (address, posts):
        words = ["--webhook", address, "--max-restarts", "1", "fails_once.py"]
        done = muster("run", "--device", "cpu", "--ranks", "1", *words)
        assert done.code == 0, done.err
        assert [post["event"] for post in posts] == ["started", "failed", "ended"]
    (run,) = (place / "runs").iterdir()
    assert {post["run"] for post in posts} == {run.name}
    assert "ValueError" in posts[1]["text"]
    assert "hf_abc" not in json.dumps(posts)
    assert (posts[2]["phase"], posts[2]["exit_code"]) == ("finished", 0)
    assert address not in RunFolder(run).job.read_text()


def test_a_webhook_that_does_not_answer_does_not_hurt_the_run(muster: Muster, place: Path) -> None:
    words = ["--webhook", "http://127.0.0.1:9/secret-path", "hello.py"]
    done = muster("run", "--device", "cpu", "--ranks", "1", *words)
    assert done.code == 0
    assert "the webhook cannot be reached" in done.err
    assert "secret-path" not in done.err


@contextmanager
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    posts: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/secret-path", posts
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("address", ["nonsense", "file:///etc/passwd", "mailto:a@b.example"])
def test_a_webhook_that_is_no_http_url_is_refused_before_there_is_a_run(
    muster: Muster, place: Path, address: str
) -> None:
    assert muster("run", "--webhook", address, "--num-gpus", "1", "hello.py").code == 2
    assert not (place / "runs").exists() or list((place / "runs").iterdir()) == []
