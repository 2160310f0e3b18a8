"""Memory: limits of cgroups of both versions, shortage, kills, a strict kernel."""

from pathlib import Path

from syrupy.assertion import SnapshotAssertion

from made_up_machine import CGROUP, IN_A_CGROUP, all_well, found, made_up_machine, only
from torchmuster.diagnose.machine.memory import CHECKS
from torchmuster.finding import Status
from torchmuster.units import GiB, KiB, MiB

(CHECK,) = CHECKS


def meminfo(total: int, free: int, **more: int) -> dict[str, object]:
    sizes = {"MemTotal": total, "MemAvailable": free, **more}
    return {"proc/meminfo": "".join(f"{name}:  {size // KiB} kB\n" for name, size in sizes.items())}


def test_plenty(tmp_path: Path) -> None:
    machine = made_up_machine(tmp_path, meminfo(64 * GiB, 60 * GiB))
    assert all_well(CHECK, machine) == "64.0 GiB, 60.0 GiB free"


def test_most_of_the_machine_is_granted(tmp_path: Path) -> None:
    files = {f"{CGROUP}/memory.max": 48 * GiB, f"{CGROUP}/memory.current": 8 * GiB}
    machine = made_up_machine(tmp_path, meminfo(64 * GiB, 60 * GiB) | IN_A_CGROUP | files)
    seen = all_well(CHECK, machine)
    assert "48.0 GiB" in seen
    assert "40.0 GiB free" in seen


def test_a_small_part_is_worth_a_note(tmp_path: Path) -> None:
    files = {f"{CGROUP}/memory.max": 16 * GiB, f"{CGROUP}/memory.current": GiB}
    machine = made_up_machine(tmp_path, meminfo(64 * GiB, 60 * GiB) | IN_A_CGROUP | files)
    finding = only(CHECK, machine)
    assert (finding.name, finding.status) == ("memory-limit", Status.NOTE)
    assert finding.evidence == f"/sys/fs/cgroup/pod/memory.max: {16 * GiB}"


def test_too_little_for_two_ranks_hurts(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    files = {f"{CGROUP}/memory.max": GiB, f"{CGROUP}/memory.current": 100 * MiB}
    machine = made_up_machine(tmp_path, meminfo(64 * GiB, 60 * GiB) | IN_A_CGROUP | files)
    finding = only(CHECK, machine)
    assert (finding.name, finding.status) == ("memory-limit", Status.WARNING)
    assert "1.0 GiB" in finding.what
    assert finding == snapshot
    assert "docker run --memory=32g" in finding.fix


def test_a_limit_of_version_1(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    mount = "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    files = {
        "proc/self/cgroup": "4:memory:/job\n",
        "proc/self/mountinfo": mount,
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": GiB,
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 900 * MiB,
        "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {100 * MiB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
    }
    machine = made_up_machine(tmp_path, meminfo(64 * GiB, 60 * GiB) | files)
    findings = found(CHECK, machine)
    assert set(findings) == {"memory-limit", "memory-full"}
    assert "224 MiB" in findings["memory-full"].what
    assert findings["memory-full"] == snapshot


def test_cached_files_are_not_counted_as_used(tmp_path: Path) -> None:
    files = {
        f"{CGROUP}/memory.max": 48 * GiB,
        f"{CGROUP}/memory.current": 48 * GiB - MiB,
        f"{CGROUP}/memory.stat": f"inactive_file {40 * GiB}\n",
    }
    machine = made_up_machine(tmp_path, meminfo(64 * GiB, 60 * GiB) | IN_A_CGROUP | files)
    assert "40.0 GiB free" in all_well(CHECK, machine)


def test_nearly_full(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    finding = only(CHECK, made_up_machine(tmp_path, meminfo(64 * GiB, 300 * MiB)))
    assert (finding.name, finding.status) == ("memory-full", Status.WARNING)
    assert "300 MiB" in finding.what
    assert finding == snapshot
    assert "--sort=-rss" in finding.fix
