"""Claims in a crowd: many processes, few GPUs, members killed at any moment. ``CLAIM_ROUNDS=500`` is the whole length."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S

CROWD = Path(__file__).with_name("claims_crowd.py")

MEMBERS = 40
KILLS_PER_ROUND = 5


@pytest.mark.stress
@pytest.mark.alone
@pytest.mark.parametrize("rounds", [int(os.environ.get("CLAIM_ROUNDS", "15"))])
def test_no_gpu_is_granted_twice_none_is_lost_and_every_waiter_is_served(
    machine: Callable[[Scenario], Path], tmp_path: Path, rounds: int
) -> None:
    machine(scenarios.eight_a100_idle())
    kills = KILLS_PER_ROUND * rounds
    done = subprocess.run(
        [sys.executable, CROWD, str(MEMBERS), str(rounds), str(kills), str(tmp_path), "1"],
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    print(told)
    assert told["errors"] == []
    assert told["granted_twice"] == 0
    assert told["still_held"] == []
    assert told["killed"] == kills
    assert told["grants"] >= MEMBERS * rounds
    assert told["starved"] == 0


def test_the_witness_would_see_a_double_grant(
    machine: Callable[[Scenario], Path], tmp_path: Path
) -> None:
    machine(scenarios.eight_a100_idle())
    without_locks = (
        "import runpy, sys; from torchmuster.devices import claims\n"
        "claims._is_locked = lambda file: False\n"
        f"runpy.run_path({str(CROWD)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", without_locks, "8", "20", "0", str(tmp_path), "1"],
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert json.loads(done.stdout)["granted_twice"] > 0
