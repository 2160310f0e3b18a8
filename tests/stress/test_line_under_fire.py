"""The line of waiting requests with three real users: random arrivals, cancels, kills and reboots."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nvml_stub
from muster_command import Stubs
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S

CROWD = Path(__file__).with_name("line_crowd.py")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that all users can enter; pytest's own are root's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)  # as /run/lock is
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become other users")
@pytest.mark.parametrize(
    ("arrivals", "seed"),
    [
        pytest.param(20, 1, id="few"),
        pytest.param(200, 2, id="many", marks=pytest.mark.stress),
        pytest.param(200, 3, id="many-again", marks=pytest.mark.stress),
    ],
)
def test_no_gpu_is_granted_twice_and_nothing_is_left(
    machine: Callable[[Scenario], Path],
    stubs: Stubs,
    open_folder: Path,
    arrivals: int,
    seed: int,
) -> None:
    path = machine(scenarios.eight_a100_idle())
    scenario = open_folder / "scenario.json"
    scenario.write_bytes(path.read_bytes())
    shutil.copy(stubs.current / nvml_stub.LIBRARY, open_folder)
    told = _crowd(open_folder, arrivals, seed, scenario)
    assert told["outcomes"]["granted twice"] == 0
    assert told["stuck"] == told["tickets_left"] == told["claims_left"] == 0
    # A job that is killed at its end may have written its line.
    assert -told["killed"] <= told["lost"] <= 0
    assert told["reboots"] == 2
    assert told["latest_overtaking_s"] < GIVE_UP_S / 4
    assert told["outcomes"]["ended"] >= arrivals // 2


def _crowd(folder: Path, arrivals: int, seed: int, scenario: Path) -> Any:
    ran = subprocess.run(
        [sys.executable, str(CROWD), str(folder), str(arrivals), str(seed)],
        env={
            **os.environ,
            nvml_stub.SCENARIO_VARIABLE: str(scenario),
            "LD_LIBRARY_PATH": str(folder),
            "PYTHONPATH": str(CROWD.parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=20 * GIVE_UP_S,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return json.loads(ran.stdout)
