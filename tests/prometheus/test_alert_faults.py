"""Every alert is raised when its condition is made true by a fault in a real run, and over when the fault is.

Rules that wait for minutes are evaluated faster: the same rules, all their times divided. Both who evaluate them must
raise them: a real Prometheus, and the product's own watching.
"""

import ctypes
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from faster_alerts import shipped_rules
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from prometheus.prometheus_lab import await_until, prometheus
from prometheus.watched_training import CONFIG, Training, Watchers, exporter, training
from torchmuster.launch.history import run_state
from torchmuster.monitor import catalogue
from torchmuster.monitor.alerts import ALERTS

# The alerts that each test raises; together they must be all of them.
NUMBERS = ("MusterLossSpike", "MusterLossNotANumber", "MusterSkippedSteps")
SLOWNESS = ("MusterDataStarved", "MusterStraggler", "MusterStalled", "MusterRunFailed")
SAVING = ("MusterCheckpointOld", "MusterLauncherDied")
RESTARTS = ("MusterGoodputLow", "MusterRunFinished")
GPUS = ("MusterGpuHot", "MusterGpuThrottled", "MusterGpuMemoryErrors", "MusterGpuMemoryNearLimit")
MACHINE = ("MusterHostMemoryLow", "MusterDiskFull", "MusterExporterDown")
ON_HOSTS = ("MusterRanksLost",)  # tests/hosts/test_elastic.py: it takes a second machine


def test_every_alert_is_raised_by_a_fault_somewhere() -> None:
    tried = {*NUMBERS, *SLOWNESS, *SAVING, *RESTARTS, *GPUS, *MACHINE, *ON_HOSTS}
    shipped = {rule["alert"] for rule in shipped_rules()}
    assert tried == shipped
    assert {one.name for one in ALERTS} < shipped


@contextmanager
def _watched(folder: Path, speed: float) -> Iterator[Watchers]:
    (folder / "runs").mkdir(exist_ok=True)
    with exporter(folder) as (port, _), prometheus(folder, [port], speed=speed) as server:
        yield Watchers(server, folder / "runs", speed)


@pytest.fixture
def folder(own_machine: Path) -> Path:
    return own_machine


@pytest.mark.nightly
def test_bad_numbers(folder: Path) -> None:
    with _watched(folder, speed=60) as watchers, training(folder) as it:
        _see_some_steps(it, watchers)
        it.begin("wild-data")
        watchers.await_raised("MusterLossSpike")
        it.end("wild-data")
        it.begin("nan")
        watchers.await_raised("MusterLossNotANumber", "MusterSkippedSteps")
        it.end("nan")
        watchers.await_over(*NUMBERS)


def _see_some_steps(it: Training, watchers: Watchers) -> None:
    """Have the watchers know what is usual: a spike is one beside that."""
    seen = it.lines()

    def enough() -> bool:
        watchers.both()
        return it.lines() > seen + 100

    await_until(enough, "a hundred steps")


@pytest.mark.nightly
def test_slowness_standstill_and_failure(folder: Path) -> None:
    with (
        _watched(folder, speed=200) as watchers,
        training(folder, "--max-restarts", "0") as it,
    ):
        for fault, alert in (
            ("slow-data", "MusterDataStarved"),
            ("slow-rank", "MusterStraggler"),
        ):
            it.begin(fault)
            watchers.await_raised(alert)
            it.end(fault)
        rank = it.rank(1)
        rank.send_signal(signal.SIGSTOP)
        watchers.await_raised("MusterStalled")
        rank.send_signal(signal.SIGCONT)
        watchers.await_over("MusterStalled", "MusterStraggler", "MusterDataStarved")
        it.begin("broken")
        assert it.process.wait(GIVE_UP_S) == 1
        watchers.await_raised("MusterRunFailed")


@pytest.mark.nightly
def test_saves_that_fail_and_a_launcher_that_is_killed(folder: Path) -> None:
    with _watched(folder, speed=2000) as watchers, training(folder) as it:
        _await_checkpoints(it, 3)  # how often it saves is known from then on
        watchers.await_over("MusterCheckpointOld")
        away = it.run.path / "away"
        away.touch()
        _exchange(it.run.checkpoints, away)  # where the next one would go is no folder any more
        watchers.await_raised("MusterCheckpointOld")
        assert it.process.poll() is None, "the training goes on"
        _exchange(it.run.checkpoints, away)
        watchers.await_over("MusterCheckpointOld")
        all_of_it = psutil.Process(it.process.pid).children(recursive=True)
        it.process.kill()
        watchers.await_raised("MusterLauncherDied")
        assert psutil.wait_procs(all_of_it, GIVE_UP_S)[1] == []


def _await_checkpoints(it: Training, count: int) -> None:
    saves = it.run.metrics / "saves.jsonl"
    await_until(
        lambda: saves.exists() and saves.read_text().count("\n") >= count, f"{count} checkpoints"
    )


def _exchange(one: Path, other: Path) -> None:
    """Put each in the place of the other in one step: in between, a save would make a folder of its own."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    done = ctypes.CDLL(None).renameat2(here, bytes(one), here, bytes(other), exchange)
    assert done == 0, (one, other)


@pytest.mark.nightly
def test_restarts(folder: Path) -> None:
    """Starting, and starting again, takes time that no step has; when the run has finished, that is told as well."""
    steps = 300
    config = CONFIG.replace("steps: 100000", f"steps: {steps}")
    (folder / "not-far").touch()  # it goes on when it was killed
    with _watched(folder, speed=1800) as watchers, training(folder, config=config) as it:
        _await_checkpoints(it, 1)
        it.begin("late-start")
        it.rank(1).kill()
        it.end("not-far")
        watchers.await_raised("MusterGoodputLow")
        it.end("late-start")
        assert it.process.wait(GIVE_UP_S) == 0
        watchers.await_raised("MusterRunFinished")
        watchers.await_over("MusterGoodputLow")
        found = watchers.value(catalogue.GOODPUT)
        assert watchers.value(catalogue.RUN_RESTARTS) == 1
        assert watchers.value(catalogue.STEPS) == steps
    lines = [json.loads(one) for one in (it.run.metrics / "steps.jsonl").read_text().splitlines()]
    made = [line["step"] for line in lines]
    assert made == list(range(1, steps + 1))  # what was made again is there once
    state = run_state.read_state(it.run)
    assert state is not None
    lasted_s = state.since_unix_s - state.started_unix_s
    in_steps_s = sum(line["step_s"] * (1 - line["checkpoint_share"]) for line in lines)
    assert found == pytest.approx(in_steps_s / lasted_s, rel=0.05)


@pytest.mark.nightly
def test_gpus(machine: Callable[[Scenario], Path], folder: Path) -> None:
    """The real reader of NVIDIA's library, on a stand-in for that library."""
    scenario = scenarios.eight_a100_idle()
    machine(scenario)
    with _watched(folder, speed=600) as watchers:
        await_until(lambda: watchers.sees(catalogue.GPU_TEMPERATURE), "the GPUs")
        watchers.await_over(*GPUS)
        gpu = scenario["devices"][3]
        well = json.dumps(gpu)
        gpu["temperature_c"] = gpu["slowdown_temperature_c"]
        gpu["throttle_reasons"] = 0x40  # NVML's bit for heat
        gpu["ecc"]["uncorrected"] = 1
        gpu["memory"]["used"] = gpu["memory"]["total"] - gpu["memory"].get("reserved", 0)
        machine(scenario)
        watchers.await_raised(*GPUS)
        scenario["devices"][3] = json.loads(well)
        machine(scenario)
        watchers.await_over(*GPUS)


@pytest.mark.nightly
def test_a_machine_without_memory_and_disk_and_then_without_exporter(folder: Path) -> None:
    """In a mount namespace of its own the disk is small, and the kernel tells of little memory."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount: run the tests as root")
    (folder / "runs").mkdir()
    told = Path("/proc/meminfo").read_text()
    little = re.sub(r"(MemAvailable:\s+)\d+", r"\g<1>1000", told)
    (folder / "meminfo").write_text(little)
    mounts = "mount -t tmpfs -o size=16m tmpfs runs && mount --bind meminfo /proc/meminfo"
    before = ("unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh")
    with (
        exporter(folder, before=before) as (port, started),
        prometheus(folder, [port], speed=100) as server,
    ):
        await_until(lambda: {"MusterHostMemoryLow", "MusterDiskFull"} <= server.firing(), "raised")
        started.kill()
        await_until(lambda: "MusterExporterDown" in server.firing(), "MusterExporterDown")
