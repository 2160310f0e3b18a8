"""``muster run --queue`` and ``muster queue`` with real jobs."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from muster_command import Muster
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from torchmuster.devices import snapshot
from torchmuster.devices.acquire import HeldDevices, acquire_devices
from torchmuster.devices.claims import Claims
from torchmuster.devices.request import DeviceRequest
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


@pytest.fixture
def place(machine: Callable[[Scenario], Path], own_machine: Path) -> Iterator[Path]:
    machine(scenarios.eight_a100_idle())
    (own_machine / "hello.py").write_text(SCRIPT)
    yield own_machine
    for folder in (own_machine / "runs").glob("*"):  # what a failed test left
        job = run_state.read_job(RunFolder(folder))
        if job is not None and (process := job.launcher.process()) is not None:
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


def submit(muster: Muster, place: Path, *words: str) -> RunFolder:
    done = muster("run", "--queue", "--num-gpus", "1", *words)
    assert done.code == 0, done.err
    return RunFolder(place / "runs" / done.out.strip())


def listed(muster: Muster) -> list[dict[str, Any]]:
    done = muster("queue", "--json")
    assert done.code == 0, done.err
    rows: list[dict[str, Any]] = json.loads(done.out)
    return rows


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def phase(run: RunFolder) -> str:
    state = run_state.read_state(run)
    return "" if state is None else state.phase


def jobs_in(muster: Muster) -> list[str]:
    return [one["job"] for one in listed(muster)]


def wait_for_tickets(place: Path, count: int) -> None:
    wait_until(lambda: len(list((place / "claims" / "queue").iterdir())) == count)


def test_a_job_beyond_the_share_of_its_owner_has_no_place(muster: Muster, place: Path) -> None:
    """Root writes the shares, so this needs root, as other tests with users do."""
    claims = Claims(place / "claims")
    look, request = snapshot.take_snapshot, DeviceRequest(count=1)
    with acquire_devices(claims, look, request, environment={}):
        shares = place / "claims" / "shares.yaml"
        shares.write_text("default: 1\n")
        shares.chmod(0o644)
        run = submit(muster, place, "hello.py")
        wait_for_tickets(place, 1)
        (row,) = listed(muster)
        assert (row["job"], row["position"], row["expected_start_unix_s"]) == (run.id, None, None)
        assert "share" in row["why"]
    wait_until(lambda: phase(run) == "finished")


def test_jobs_wait_in_the_order_that_their_owner_gives_them(muster: Muster, place: Path) -> None:
    with all_gpus(place):
        first = submit(muster, place, "--name", "first", "hello.py", "a")
        second = submit(muster, place, "--name", "second", "--priority", "2", "hello.py")
        after = submit(muster, place, "--after", "second", "--name", "third", "hello.py")
        held = submit(muster, place, "--hold", "--name", "held", "hello.py")
        wait_for_tickets(place, 4)
        assert jobs_in(muster) == [second.id, first.id, after.id, held.id]
        assert muster("queue", "priority", first.id, "5").code == 0
        wait_until(lambda: jobs_in(muster)[:2] == [first.id, second.id])
        rows = {row["job"]: row for row in listed(muster)}
        assert rows[after.id]["after"] == [second.id]
        assert rows[held.id]["held"]
        assert rows[first.id]["expected_start_unix_s"] is None
        shown = muster("gpus").out
        assert "4 requests in the queue" in shown
    wait_until(lambda: phase(after) == "finished")
    assert phase(first) == phase(second) == "finished"
    assert phase(held) == "queued"
    assert muster("queue", "cancel", "held").code == 0
    assert phase(held) == "stopped"
    assert listed(muster) == []
    assert list((place / "state" / "torchmuster" / "queue").iterdir()) == []


def test_a_job_whose_predecessor_fails_is_cancelled_and_names_it(
    muster: Muster, place: Path
) -> None:
    (place / "fails.py").write_text("raise SystemExit(1)")
    with all_gpus(place):
        bad = submit(muster, place, "--name", "bad", "fails.py")
        child = submit(muster, place, "--after", bad.id, "hello.py")
    wait_until(lambda: phase(child) == "failed")
    state = run_state.read_state(child)
    assert state is not None
    assert bad.id in state.headline
    refused = muster("run", "--queue", "--num-gpus", "1", "--after", bad.id, "hello.py")
    assert refused.code == 1
    assert len(list((place / "runs").iterdir())) == 2


@pytest.mark.parametrize("kills_launcher_first", [True, False], ids=["launcher", "children"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_a_job_that_a_reboot_ended_is_restored_and_keeps_its_waiting_time(
    muster: Muster, place: Path, kills_launcher_first: bool, number: signal.Signals
) -> None:
    with all_gpus(place):
        job = submit(muster, place, "--priority", "3", "--time-limit", "1h", "hello.py", "--x", "1")
        wait_for_tickets(place, 1)
        (before,) = listed(muster)
        known = run_state.read_job(job)
        assert known is not None
        launcher = psutil.Process(known.launcher.pid)
        processes = launcher.children(recursive=True)
        processes.insert(0 if kills_launcher_first else len(processes), launcher)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        psutil.wait_procs(processes, timeout=GIVE_UP_S)
        shutil.rmtree(place / "claims" / "queue")
        (place / "claims" / "queue").mkdir()
        assert phase(job) in ("died", "failed", "stopped")
        done = muster("queue", "restore")
        assert done.code == 0, done.err
        wait_for_tickets(place, 1)
        (restored,) = listed(muster)
        for name in ("job", "waiting_since_unix_s", "priority", "time_limit_s", "name"):
            assert restored[name] == before[name]
        assert "0 jobs" in muster("queue", "restore").err
    wait_until(lambda: phase(job) == "finished")
    assert "--x" in (job.logs / "rank-0.log").read_text()


def test_a_time_limit_stops_the_run_and_is_seen_by_others(muster: Muster, place: Path) -> None:
    (place / "long.py").write_text(UNTIL_SIGTERM)
    began = time.time()
    run = submit(muster, place, "--time-limit", "10s", "--grace", "5s", "long.py")
    wait_until(lambda: phase(run) == "running")
    uuids = [one.uuid for one in snapshot.take_snapshot().accelerators]
    (claim,) = Claims(place / "claims").glance(uuids).claimed.values()
    assert claim.run == str(run.path)
    assert claim.ends_unix_s is not None
    assert 10 < claim.ends_unix_s - began < GIVE_UP_S
    wait_until(lambda: phase(run) == "stopped")
    state = run_state.read_state(run)
    assert state is not None
    assert "time limit" in state.headline
    assert "time-limit" in [event.name for event in run_state.read_events(run)]


def test_a_webhook_hears_of_the_start_and_of_the_end(muster: Muster, place: Path) -> None:
    with hook() as (address, heard):
        run = submit(muster, place, "--notify", address, "hello.py")
        wait_until(lambda: len(heard) == 2)
    assert all(run.id in text for text in heard)
    assert "started" in heard[0]
    assert "finished" in heard[1]
    assert address not in run.job.read_text()


@contextmanager
def hook() -> Iterator[tuple[str, list[str]]]:
    heard: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/secret-path", heard
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--queue", "hello.py"], 2),
        (["--queue", "--num-gpus", "1", "--hosts", "a", "hello.py"], 2),
        (["--queue", "--num-gpus", "9", "hello.py"], 2),
        (["--hold", "--num-gpus", "1", "hello.py"], 2),
        (["--queue", "--num-gpus", "1", "--after", "nosuch", "hello.py"], 2),
        (["--queue", "--num-gpus", "1", "--notify", "nonsense", "hello.py"], 2),
    ],
)
def test_what_cannot_be_queued_is_refused_before_there_is_a_run(
    muster: Muster, place: Path, words: list[str], code: int
) -> None:
    assert muster("run", *words).code == code
    assert not (place / "runs").exists() or list((place / "runs").iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_only_the_owner_changes_a_job(muster: Muster, place: Path) -> None:
    with all_gpus(place):
        job = submit(muster, place, "hello.py")
        wait_for_tickets(place, 1)
        (ticket,) = (place / "claims" / "queue").iterdir()
        os.chown(ticket, 1, 1)
        for words in (["cancel", job.id], ["hold", job.id], ["priority", job.id, "3"]):
            refused = muster("queue", *words)
            assert refused.code == 2
            assert "daemon" in refused.err
        assert phase(job) == "queued"
        os.chown(ticket, 0, 0)
        # A ticket of this user that names a folder of another one.
        os.chown(job.path, 1, 1)
        assert muster("queue", "cancel", job.id).code == 2
        os.chown(job.path, 0, 0)
        assert muster("queue", "cancel", job.id).code == 0
