"""Memory: limits of cgroups of both versions, shortage, kills, a strict kernel."""

from pathlib import Path

from syrupy.assertion import SnapshotAssertion

from made_up_machine import CGROUP, IN_A_CGROUP, made_up_machine, only
from torchmuster.diagnose.machine.memory import CHECKS
from torchmuster.finding import Status
from torchmuster.units import GiB, KiB, MiB

(CHECK,) = CHECKS


def meminfo(total: int, free: int, **more: int) -> dict[str, object]:
    sizes = {"MemTotal": total, "MemAvailable": free, **more}
    return {"proc/meminfo": "".join(f"{name}:  {size // KiB} kB\n" for name, size in sizes.items())}


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


def test_nearly_full(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    finding = only(CHECK, made_up_machine(tmp_path, meminfo(64 * GiB, 300 * MiB)))
    assert (finding.name, finding.status) == ("memory-full", Status.WARNING)
    assert "300 MiB" in finding.what
    assert finding == snapshot
    assert "--sort=-rss" in finding.fix
