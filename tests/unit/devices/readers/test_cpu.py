"""The CPU and the part of it that control groups and affinity leave to this process."""

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.devices.model import DeviceKind
from torchmuster.devices.readers import cpu
from torchmuster.units import GiB

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755
32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct ro,nosuid - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 {root} /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory
34 31 0:31 {root} /sys/fs/cgroup/cpuset ro,nosuid - cgroup cgroup rw,cpuset"""
CPUINFO = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 7763 64-Core Processor
stepping\t: 1

processor\t: 1
model name\t: another"""


def write(root: Path, files: Mapping[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def cgroup(root: Path, membership: str, mountinfo: str, files: Mapping[str, object]) -> None:
    write(root, {"proc/self/cgroup": membership, "proc/self/mountinfo": mountinfo})
    write(root / "sys/fs/cgroup", files)


def cores(root: Path, allowed: int = 64) -> tuple[int, str]:
    with (
        mock.patch("os.cpu_count", return_value=64),
        mock.patch.object(cpu, "_affinity", return_value=allowed),
    ):
        decision = cpu.usable_cores(root / "proc", root / "sys")
    return decision.value, decision.reason


@pytest.fixture
def machine_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=256 * GiB, available=200 * GiB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def memory(root: Path) -> tuple[int | None, int | None]:
    device = cpu.read_cpu(root / "proc", root / "sys", "Linux")
    return device.total_bytes, device.used_bytes


@pytest.mark.usefixtures("machine_memory")
def test_a_machine_without_limits_is_reported_whole(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": CPUINFO})
    device = cpu.read_cpu(tmp_path / "proc", tmp_path / "sys", "Linux")
    assert device.kind is DeviceKind.CPU
    assert (device.index, device.uuid, device.label) == (0, "CPU-0", "CPU")
    assert device.name == "AMD EPYC 7763 64-Core Processor"
    assert (device.total_bytes, device.used_bytes) == (256 * GiB, 56 * GiB)
    assert device.utilization_percent is None


def test_this_very_machine_can_be_read() -> None:
    device = cpu.read_cpu()
    decision = cpu.usable_cores()
    assert device.total_bytes
    assert device.used_bytes is not None
    assert 0 < device.used_bytes < device.total_bytes
    assert decision.value >= 1
    assert "cores: " in decision.reason


@pytest.mark.usefixtures("machine_memory")
def test_memory_is_what_the_cgroup_grants_and_cached_files_do_not_fill_it(tmp_path: Path) -> None:
    files = {
        "job/memory.max": 16 * GiB,
        "job/memory.current": 15 * GiB,
        "job/memory.stat": f"anon {4 * GiB}\nfile {11 * GiB}\ninactive_file {10 * GiB}",
    }
    cgroup(tmp_path, "0::/job", V2_MOUNT, files)
    assert memory(tmp_path) == (16 * GiB, 5 * GiB)


@pytest.mark.usefixtures("machine_memory")
def test_version_1_limits_memory_too(tmp_path: Path) -> None:
    files = {
        "memory/slurm/job_7/memory.limit_in_bytes": 32 * GiB,
        "memory/slurm/job_7/memory.usage_in_bytes": 9 * GiB,
        "memory/slurm/job_7/memory.stat": f"inactive_file 5\ntotal_inactive_file {GiB}",
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/memory.usage_in_bytes": 60 * GiB,
    }
    membership = "5:memory:/slurm/job_7\n4:cpu,cpuacct:/\n0::/"
    cgroup(tmp_path, membership, V1_MOUNTS.format(root="/"), files)
    assert memory(tmp_path) == (32 * GiB, 8 * GiB)


@pytest.mark.usefixtures("machine_memory")
def test_memory_that_others_in_the_group_above_hold_is_not_free(tmp_path: Path) -> None:
    files = {
        "pod/job/memory.max": 16 * GiB,
        "pod/job/memory.current": 2 * GiB,
        "pod/memory.max": 24 * GiB,
        "pod/memory.current": 23 * GiB,
    }
    cgroup(tmp_path, "0::/pod/job", V2_MOUNT, files)
    assert memory(tmp_path) == (16 * GiB, 15 * GiB)


def test_a_quota_limits_the_cores_and_is_named(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    cgroup(tmp_path, "0::/job", V2_MOUNT, {"job/cpu.max": "800000 100000"})
    value, reason = cores(tmp_path)
    assert value == 8
    assert "8.0 (cpu.max)" in reason
    assert reason == snapshot


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    cgroup(tmp_path, "0::/", V2_MOUNT, {"cpu.max": "400000 100000"})
    assert cores(tmp_path)[0] == 4


def test_a_docker_container_of_version_1_finds_its_quota(tmp_path: Path) -> None:
    """Its own path is shown as the host has it, though the mount begins there."""
    path = "/docker/3f2a"
    files = {"cpu,cpuacct/cpu.cfs_quota_us": 600000, "cpu,cpuacct/cpu.cfs_period_us": 100000}
    cgroup(tmp_path, f"4:cpu,cpuacct:{path}", V1_MOUNTS.format(root=path), files)
    value, reason = cores(tmp_path)
    assert value == 6
    assert "6.0 (cpu.cfs_quota_us)" in reason


def test_the_tighter_of_mask_and_quota_decides_and_the_other_is_mentioned(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    cgroup(tmp_path, "0::/job", V2_MOUNT, {"job/cpu.max": "400000 100000"})
    value, reason = cores(tmp_path, allowed=16)
    assert value == 4
    assert reason.endswith(" 16")
    assert reason == snapshot
    assert cores(tmp_path, allowed=2)[0] == 2


@settings(max_examples=60, deadline=None)
@given(
    quotas=st.lists(st.none() | st.integers(1, 10**8), min_size=1, max_size=4),
    allowed=st.integers(1, 64),
)
def test_the_answer_is_the_tightest_limit_of_all(quotas: list[int | None], allowed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        path = "".join(f"/level{depth}" for depth in range(len(quotas)))
        files = {}
        for depth, quota in enumerate(quotas):
            level = "".join(f"level{above}/" for above in range(depth + 1))
            files[f"{level}cpu.max"] = f"{quota or 'max'} 100000"
        cgroup(root, f"0::{path}", V2_MOUNT, files)
        limits = [math.ceil(quota / 100000) for quota in quotas if quota is not None]
        assert cores(root, allowed)[0] == min(allowed, 64, *limits)


@settings(max_examples=60, deadline=None)
@given(
    membership=st.text(max_size=60), mountinfo=st.text(max_size=120), quota=st.binary(max_size=20)
)
def test_garbled_files_leave_the_whole_machine(
    membership: str, mountinfo: str, quota: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root / "proc/self", {})
        cgroup(root, "0::/", V2_MOUNT, {"cpu.max": ""})
        (root / "sys/fs/cgroup/cpu.max").write_bytes(quota)
        assert 1 <= cores(root)[0] <= 64
        (root / "proc/self/cgroup").write_text(membership, errors="replace")
        (root / "proc/self/mountinfo").write_text(mountinfo, errors="replace")
        assert cores(root)[0] == 64
        assert cpu.read_cpu(root / "proc", root / "sys", "Linux").total_bytes
