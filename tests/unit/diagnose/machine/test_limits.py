"""Limits of a process, as /proc/self/limits tells them."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import CGROUP, IN_A_CGROUP, all_well, found, made_up_machine, only
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine.limits import CHECKS
from torchmuster.finding import Status

(CHECK,) = CHECKS
USUAL = {
    "Max file size": ("unlimited", "unlimited", "bytes"),
    "Max processes": ("96360", "96360", "processes"),
    "Max open files": ("20000", "20000", "files"),
    "Max locked memory": ("8388608", "8388608", "bytes"),
    "Max address space": ("unlimited", "unlimited", "bytes"),
}


def machine(root: Path, files: Mapping[str, object] | None = None, **limits: str) -> Surroundings:
    rows = dict(USUAL)
    for name, value in limits.items():
        soft, _, hard = value.partition(" ")
        rows["Max " + name.replace("_", " ")] = (soft, hard or soft, "units")
    lines = ["Limit                     Soft Limit           Hard Limit           Units     "]
    lines += [
        f"{name:<25} {soft:<20} {hard:<20} {unit}" for name, (soft, hard, unit) in rows.items()
    ]
    told = {"proc/self/limits": "\n".join(lines), "proc/self/status": "Uid:\t1000\t1000\n"}
    return made_up_machine(root, told | dict(files or {}))


@pytest.mark.parametrize(("soft", "status"), [("256", Status.WARNING), ("1024", Status.NOTE)])
def test_few_open_files(tmp_path: Path, soft: str, status: Status) -> None:
    finding = only(CHECK, machine(tmp_path, open_files=f"{soft} 1048576"))
    assert (finding.name, finding.status) == ("open-files-low", status)
    assert finding.fix.startswith("ulimit -n 65536 ")
    assert "docker run --ulimit nofile=65536" in finding.fix
    assert "LimitNOFILE=65536" in finding.fix


def test_few_open_files_that_only_root_may_raise(tmp_path: Path) -> None:
    finding = only(CHECK, machine(tmp_path, open_files="256 256"))
    assert "ulimit -n" not in finding.fix
    assert "/etc/security/limits.d/90-nofile.conf" in finding.fix


def test_locked_memory_counts_only_with_rdma(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    all_well(CHECK, machine(tmp_path))
    finding = only(CHECK, machine(tmp_path, {"dev/infiniband/uverbs0": ""}))
    assert (finding.name, finding.status) == ("locked-memory-low", Status.WARNING)
    assert "8.0 MiB" in finding.what
    assert finding == snapshot
    assert "ulimit -l unlimited" in finding.fix
    assert "--ulimit memlock=-1" in finding.fix
    more = machine(tmp_path, {"dev/infiniband/uverbs0": ""}, locked_memory="unlimited")
    all_well(CHECK, more)


@pytest.mark.parametrize(("most", "warns"), [("512", True), ("max", False), ("4096", False)])
def test_processes_of_a_cgroup(
    tmp_path: Path, most: str, warns: bool, snapshot: SnapshotAssertion
) -> None:
    files = IN_A_CGROUP | {f"{CGROUP}/pids.max": most, f"{CGROUP}/pids.current": "400"}
    findings = found(CHECK, machine(tmp_path, files))
    assert ("pids-few" in findings) == warns
    if warns:
        assert "512" in findings["pids-few"].what
        assert findings["pids-few"] == snapshot
        assert "docker run --pids-limit=-1" in findings["pids-few"].fix
