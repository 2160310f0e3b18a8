"""How long a process has been idle, from look to look."""

import json
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


def test_a_process_that_keeps_its_gpu_busy_is_not_idle() -> None:
    _, record = look({}, 0, holding(worker()))
    seen, _ = look(record, 600, holding(worker(utilization_percent=30)))
    assert idle(seen) == [0.0]
    seen, _ = look(record, 600, holding(worker(), percent=80))
    assert idle(seen) == [0.0]


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


def test_a_clock_that_was_set_back_gives_no_negative_times() -> None:
    _, record = look({}, 0, holding(worker()))
    seen, record = look(record, -3600, holding(worker()))
    assert idle(seen) == [0.0]
    seen, _ = look(record, -3500, holding(worker()))
    assert idle(seen) == [100.0]


# The file


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
