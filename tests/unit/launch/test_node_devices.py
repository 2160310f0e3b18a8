"""A machine's accelerators in the run's folder: for others, without what others typed."""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from torchmuster.devices import snapshot
from torchmuster.launch.history import node_records
from torchmuster.runfolder import RunFolder, create_run_folder

Machine = Callable[[Scenario], Path]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path / "runs", "llm")


def _written(run: RunFolder, first_rank: int) -> Path:
    return run.metrics / f"devices-from-{first_rank}.json"


def test_what_was_written_is_read(machine: Machine, run: RunFolder) -> None:
    machine(scenarios.eight_a100())
    node = snapshot.take_snapshot()
    node_records.write_node_devices(_written(run, 8), node)
    (found,) = node_records.read_node_devices(run, node.taken_unix_s)
    assert found.devices == node.accelerators
    assert node_records.read_node_devices(run, node.taken_unix_s + 60) == []  # too old


def test_command_lines_are_left_out(machine: Machine, run: RunFolder) -> None:
    scenario = scenarios.eight_a100_idle()
    process = {"pid": os.getpid(), "memory": 2**30, "type": "compute", "sm_percent": 0}
    scenario["devices"][0]["processes"] = [process]
    machine(scenario)
    node = snapshot.take_snapshot()
    assert node.accelerators[0].processes[0].command
    node_records.write_node_devices(_written(run, 0), node)
    (found,) = node_records.read_node_devices(run, node.taken_unix_s)
    (one,) = found.devices[0].processes
    assert one == dataclasses.replace(node.accelerators[0].processes[0], command=None)


def test_noting_goes_on_until_it_is_over(
    machine: Machine, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_records, "_EVERY_S", 0.01)
    machine(scenarios.eight_a100())

    def busy_is(percent: int) -> bool:
        seen = [
            one for node in node_records.read_node_devices(run, time.time()) for one in node.devices
        ]
        return bool(seen) and seen[0].utilization_percent == percent

    with node_records.NodeRecorder(run, 0):
        _await(lambda: busy_is(98))
        machine(scenarios.eight_a100_idle())
        _await(lambda: busy_is(0))


def test_a_machine_without_accelerators_writes_nothing(machine: Machine, run: RunFolder) -> None:
    machine(scenarios.no_gpus())
    with node_records.NodeRecorder(run, 0) as thread:
        thread.join(GIVE_UP_S)
        assert not thread.is_alive()
    assert not _written(run, 0).exists()


@pytest.mark.parametrize("content", [b"", b"{", b'{"host": 3}', b"\xff"])
def test_a_file_that_is_damaged_is_passed_over(run: RunFolder, content: bytes) -> None:
    _written(run, 0).write_bytes(content)
    assert node_records.read_node_devices(run, time.time()) == []


def test_a_folder_that_cannot_be_written_to_ends_nothing(machine: Machine, tmp_path: Path) -> None:
    machine(scenarios.eight_a100())
    (tmp_path / "file").write_text("")
    node_records.write_node_devices(
        tmp_path / "file" / "metrics" / "x.json", snapshot.take_snapshot()
    )


def _await(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
