"""How long a process has been idle, from look to look."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from device_strategies import gpu, node
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.devices import snapshot
from torchmuster.devices.model import Device, DeviceProcess, Node
from torchmuster.devices.snapshot import Record, Sighting

START = 1_700_000_000.0


def worker(cpu_s: float | None = 100.0, **changes: object) -> DeviceProcess:
    usual = DeviceProcess(pid=42, compute=True, started_unix_s=START - 5000.25, cpu_s=cpu_s)
    return replace(usual, **changes)  # type: ignore[arg-type]


def holding(*processes: DeviceProcess, index: int = 0, percent: int | None = 0) -> Device:
    return gpu(index, processes=processes, utilization_percent=percent)


def look(record: Mapping[str, Sighting], after_s: float, *devices: Device) -> tuple[Node, Record]:
    return snapshot.update_sightings(record, replace(node(*devices), taken_unix_s=START + after_s))


def idle(seen: Node) -> list[float | None]:
    return [process.idle_s for device in seen.accelerators for process in device.processes]


def test_the_first_look_knows_nothing() -> None:
    seen, _ = look({}, 0, holding(worker()))
    assert idle(seen) == [None]


def test_a_process_whose_time_stands_still_has_been_idle_since_the_first_look() -> None:
    _, record = look({}, 0, holding(worker()))
    seen, record = look(record, 600, holding(worker()))
    assert idle(seen) == [600.0]
    seen, _ = look(record, 900, holding(worker()))
    assert idle(seen) == [900.0]


def test_processor_time_that_moves_starts_the_count_anew() -> None:
    _, record = look({}, 0, holding(worker(100)))
    _, record = look(record, 600, holding(worker(100)))
    seen, record = look(record, 700, holding(worker(160)))
    assert idle(seen) == [0.0]
    seen, _ = look(record, 800, holding(worker(160)))
    assert idle(seen) == [100.0]


@pytest.mark.parametrize(("cpu_s", "expected"), [(101.9, 100.0), (102.1, 0.0)])
def test_threads_that_wake_now_and_then_are_no_work(cpu_s: float, expected: float) -> None:
    _, record = look({}, 0, holding(worker(100)))
    seen, _ = look(record, 100, holding(worker(cpu_s)))
    assert idle(seen) == [expected]


def test_a_process_that_keeps_its_gpu_busy_is_not_idle() -> None:
    _, record = look({}, 0, holding(worker()))
    seen, _ = look(record, 600, holding(worker(utilization_percent=30)))
    assert idle(seen) == [0.0]
    seen, _ = look(record, 600, holding(worker(), percent=80))
    assert idle(seen) == [0.0]


def test_on_a_busy_gpu_with_several_processes_nobody_is_blamed() -> None:
    other = worker(pid=43)
    _, record = look({}, 0, holding(worker(), other))
    seen, _ = look(record, 600, holding(worker(), other, percent=80))
    assert idle(seen) == [600.0, 600.0]
    window = worker(pid=44, compute=False)
    seen, _ = look(record, 600, holding(worker(), window, percent=80))
    assert idle(seen) == [0.0, None]


@pytest.mark.parametrize("busy_first", [True, False])
def test_a_process_that_works_on_one_of_its_gpus_is_idle_on_none(busy_first: bool) -> None:
    def both(percent: int) -> list[Device]:
        first, second = (percent, 0) if busy_first else (0, percent)
        return [
            holding(worker(), index=0, percent=first),
            holding(worker(), index=1, percent=second),
        ]

    _, record = look({}, 0, *both(0))
    seen, record = look(record, 600, *both(90))
    assert idle(seen) == [0.0, 0.0]
    seen, _ = look(record, 700, *both(0))
    assert idle(seen) == [100.0, 100.0]


def test_another_process_under_the_same_pid_is_not_known_yet() -> None:
    _, record = look({}, 0, holding(worker()))
    later = worker(started_unix_s=START + 300)
    seen, record = look(record, 600, holding(later))
    assert idle(seen) == [None]
    assert list(record) == [f"42@{START + 300:.2f}"]


@pytest.mark.parametrize(
    "stranger",
    [
        worker(None),
        worker(started_unix_s=None),
        worker(compute=False),
    ],
)
def test_windows_and_processes_that_cannot_be_seen_are_left_out(stranger: DeviceProcess) -> None:
    _, record = look({}, 0, holding(stranger))
    assert record == {}
    seen, _ = look({}, 600, holding(stranger))
    assert idle(seen) == [None]


def test_who_has_gone_is_forgotten() -> None:
    _, record = look({}, 0, holding(worker(), worker(pid=43)))
    assert len(record) == 2
    _, record = look(record, 10, holding(worker()))
    assert len(record) == 1
    assert look(record, 20, holding())[1] == {}


def test_a_clock_that_was_set_back_gives_no_negative_times() -> None:
    _, record = look({}, 0, holding(worker()))
    seen, record = look(record, -3600, holding(worker()))
    assert idle(seen) == [0.0]
    seen, _ = look(record, -3500, holding(worker()))
    assert idle(seen) == [100.0]


def test_the_devices_are_otherwise_unchanged() -> None:
    before = holding(worker(), percent=5)
    seen, _ = look({}, 0, before)
    assert seen.accelerators == (before,)


# The file


def test_the_record_is_kept_in_the_users_state_folder() -> None:
    tail = Path("torchmuster/gpu-activity-box.json")
    home = Path.home() / ".local/state" / tail
    assert snapshot.sightings_path({"XDG_STATE_HOME": "/x"}, "box") == Path("/x") / tail
    assert snapshot.sightings_path({}, "box") == home
    assert snapshot.sightings_path({"XDG_STATE_HOME": ""}, "box") == home


def test_a_user_without_a_home_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert snapshot.sightings_path({}, "box") is None


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    _, record = look({}, 0, holding(worker()))
    path = tmp_path / "new" / "folder" / "record.json"
    snapshot.save_sightings(path, record)
    assert snapshot.load_sightings(path) == record != {}


GOOD = {"seen_unix_s": START, "cpu_s": 1.0, "active_unix_s": START}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "\x00",
        json.dumps({"42@1.00": 7}),
        json.dumps({"42@1.00": None}),
        json.dumps({"42@1.00": {"cpu_s": 1.0}}),
        json.dumps({"42@1.00": {**GOOD, "more": 1}}),
        json.dumps({"42@1.00": {**GOOD, "cpu_s": "much"}}),
        json.dumps({"42@1.00": {**GOOD, "cpu_s": None}}),
        json.dumps({"42@1.00": {**GOOD, "seen_unix_s": []}}),
        json.dumps({"42@1.00": {**GOOD, "active_unix_s": float("nan")}}),
        json.dumps({"42@1.00": {**GOOD, "active_unix_s": float("inf")}}),
        json.dumps({"42@1.00": {**GOOD, "cpu_s": 10**400}}),
    ],
)
def test_a_broken_record_is_the_same_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    assert snapshot.load_sightings(path) == {}


def test_a_record_that_is_no_text_is_the_same_as_none(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(b"\xff\xfe\xff")
    assert snapshot.load_sightings(path) == {}
    assert snapshot.load_sightings(tmp_path) == {}
    assert snapshot.load_sightings(tmp_path / "missing.json") == {}


def test_where_nothing_can_be_written_idle_times_stay_unknown(tmp_path: Path) -> None:
    """A file stands where the folder should be, which stops even root."""
    (tmp_path / "state").touch()
    path = tmp_path / "state" / "record.json"
    snapshot.save_sightings(path, {"42@1.00": Sighting(**GOOD)})
    assert snapshot.load_sightings(path) == {}


# On a machine

Machine = Callable[[Scenario], Path]


def test_the_second_look_at_a_machine_knows_who_was_idle(machine: Machine) -> None:
    scenario = scenarios.eight_a100_idle()
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE) as running:
        scenario["devices"][3]["processes"] = [{"pid": running.pid, "memory": 1}]
        machine(scenario)
        looks = [snapshot.take_snapshot_with_history().accelerators[3].processes for _ in range(2)]
        running.communicate()
    (first,), (second,) = looks
    assert first.idle_s is None
    assert second.idle_s is not None
    assert (first.pid, first.user) == (second.pid, second.user)


def test_a_machine_on_which_nobody_computes_leaves_no_file(machine: Machine) -> None:
    machine(scenarios.eight_a100_idle())
    snapshot.take_snapshot_with_history()
    assert not (Path(os.environ["XDG_STATE_HOME"]) / "torchmuster").exists()


def test_a_look_without_history_keeps_nothing(machine: Machine) -> None:
    scenario = scenarios.eight_a100_idle()
    scenario["devices"][3]["processes"] = [{"pid": os.getpid(), "memory": 1}]
    machine(scenario)
    assert snapshot.take_snapshot().accelerators[3].processes[0].pid == os.getpid()
    assert not (Path(os.environ["XDG_STATE_HOME"]) / "torchmuster").exists()
