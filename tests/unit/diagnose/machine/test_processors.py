"""Processors: quota, affinity, throttling, load, governor."""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import CGROUP, IN_A_CGROUP, made_up_machine, only
from torchmuster.diagnose.machine.processors import CHECKS
from torchmuster.finding import Status

(CHECK,) = CHECKS
SIXTEEN = {
    "sys/devices/system/cpu/online": "0-15\n",
    "proc/self/status": "Cpus_allowed_list:\t0-15\n",
    "proc/loadavg": "0.50 0.40 0.30 1/200 4242\n",
}


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
