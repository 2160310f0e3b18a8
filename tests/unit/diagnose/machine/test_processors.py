"""Processors: quota, affinity, throttling, load, governor."""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import CGROUP, IN_A_CGROUP, all_well, made_up_machine, only
from torchmuster.diagnose.machine.processors import CHECKS
from torchmuster.finding import Status

(CHECK,) = CHECKS
SIXTEEN = {
    "sys/devices/system/cpu/online": "0-15\n",
    "proc/self/status": "Cpus_allowed_list:\t0-15\n",
    "proc/loadavg": "0.50 0.40 0.30 1/200 4242\n",
}
FREQUENCY = "sys/devices/system/cpu/cpu0/cpufreq"


def test_all_cores_of_two_nodes(tmp_path: Path) -> None:
    seen = all_well(CHECK, made_up_machine(tmp_path, SIXTEEN))
    assert seen.startswith("all 16 cores")


@pytest.mark.parametrize(("quota", "status"), [("50000", Status.WARNING), ("400000", Status.NOTE)])
def test_a_quota(tmp_path: Path, quota: str, status: Status, snapshot: SnapshotAssertion) -> None:
    files = SIXTEEN | IN_A_CGROUP | {f"{CGROUP}/cpu.max": f"{quota} 100000\n"}
    finding = only(CHECK, made_up_machine(tmp_path, files))
    assert (finding.name, finding.status) == ("cpu-quota", status)
    cores = int(quota) / 100000
    assert f"{cores} cores" in finding.what
    assert finding == snapshot
    assert f"export OMP_NUM_THREADS={max(1, int(cores))}" in finding.fix


def test_one_core_of_many(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    files = SIXTEEN | {"proc/self/status": "Cpus_allowed_list:\t3\n"}
    finding = only(CHECK, made_up_machine(tmp_path, files))
    assert (finding.name, finding.status) == ("cpu-affinity", Status.WARNING)
    assert "16" in finding.what
    assert finding == snapshot
    assert "#SBATCH --cpus-per-task=8" in finding.fix


def test_some_cores_of_many_are_what_was_asked_for(tmp_path: Path) -> None:
    files = SIXTEEN | {"proc/self/status": "Cpus_allowed_list:\t0-3,8\n"}
    assert all_well(CHECK, made_up_machine(tmp_path, files)).startswith("5 of 16 cores")


def test_the_only_core_of_a_machine_is_no_fault(tmp_path: Path) -> None:
    files = {
        "sys/devices/system/cpu/online": "0\n",
        "proc/self/status": "Cpus_allowed_list:\t0\n",
    }
    all_well(CHECK, made_up_machine(tmp_path, files))
