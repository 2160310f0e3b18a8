"""What a machine knows of memory: made-up cgroup trees, and one real kill by the kernel."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from patience import GIVE_UP_S
from torchmuster.launch.node.memory_evidence import KERNEL_KILLED_IT, MemoryPeaks, MemoryWatch
from torchmuster.units import GiB, MiB

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="cgroups and /proc are Linux's")


def write(root: Path, files: Mapping[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


@pytest.fixture
def version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container whose job may use 64 GiB of a machine of 256 GiB."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=256 * GiB))
    write(tmp_path, {"proc/self/cgroup": "0::/pod/job", "proc/self/mountinfo": V2_MOUNT})
    write(tmp_path / "sys/fs/cgroup", {"pod/memory.max": 64 * GiB, "pod/job/memory.max": "max"})
    set_kills(tmp_path, 2)
    return tmp_path


def set_kills(root: Path, job: int, pod: int | None = None) -> None:
    counts = {"pod/job": job, "pod": job if pod is None else pod}
    for name, count in counts.items():
        events = f"low 0\nhigh 0\nmax 12\noom 3\noom_kill {count}\noom_group_kill 0"
        write(root / "sys/fs/cgroup", {f"{name}/memory.events": events})


def begin(root: Path) -> MemoryWatch:
    return MemoryWatch.begin(root / "proc", root / "sys")


def peaks(root: Path, **kilobytes: int) -> MemoryPeaks:
    for pid, size in kilobytes.items():
        status = f"Name:\tpython3\nVmHWM:\t{size:8} kB\nVmRSS:\t{size // 2:8} kB"
        write(root, {f"proc/{pid.removeprefix('p')}/status": status})
    seen = MemoryPeaks(root / "proc")
    seen.sample([int(pid.removeprefix("p")) for pid in kilobytes])
    return seen


@LINUX
def test_a_kill_that_the_cgroup_counted_is_explained_with_peak_and_limit(version_2: Path) -> None:
    watch = begin(version_2)
    seen = peaks(version_2, p500=61 * 2**20)
    set_kills(version_2, 3)
    told = watch.explain(500, -9, seen)
    assert told.startswith(KERNEL_KILLED_IT)
    assert watch.explain(500, 137, seen) == told
    limit = watch.explain(500, -9, MemoryPeaks())
    assert limit.startswith(KERNEL_KILLED_IT)


@LINUX
def test_kills_of_before_and_kills_of_a_neighbour_explain_nothing(version_2: Path) -> None:
    watch = begin(version_2)
    set_kills(version_2, 2, pod=9)
    seen = peaks(version_2, p77=2**20)
    told = watch.explain(77, -9, seen)
    assert KERNEL_KILLED_IT not in told


@LINUX
def test_a_worker_that_the_kernel_killed_is_evidence_for_its_rank(version_2: Path) -> None:
    watch = begin(version_2)
    assert watch.explain(500, 1, MemoryPeaks()) == ""
    set_kills(version_2, 3)
    assert watch.explain(500, -15, MemoryPeaks()) == ""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A real cgroup, of whichever version is here, that may use 64 MiB."""
    version_1, version_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent = version_1 if version_1.is_dir() else version_2
    folder = parent / f"torchmuster-test-{os.getpid()}"
    try:
        if parent == version_2:
            (parent / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs root and writable memory cgroups (docker run --privileged): {error}")
    try:
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max"):
            if (folder / name).exists():
                (folder / name).write_text(str(64 * MiB))
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")
        yield folder
    finally:
        folder.rmdir()


def test_a_real_kill_by_the_kernel_is_recognized(small_cgroup: Path) -> None:
    # As in a container: whoever watches is in the same cgroup as the victim.
    program = f"""
        import os, pathlib, subprocess, sys, time
        pathlib.Path({str(small_cgroup / "cgroup.procs")!r}).write_text(str(os.getpid()))
        from torchmuster.launch.node.memory_evidence import MemoryPeaks, MemoryWatch
        watch, peaks = MemoryWatch.begin(), MemoryPeaks()
        hungry = "print(flush=True)\\ninput()\\ndata = []\\nwhile True: data.append(bytearray(2**20))"
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child = subprocess.Popen([sys.executable, "-c", hungry], **pipes)
        child.stdout.readline()
        peaks.sample([child.pid])  # once at least: on a busy machine it may be the only time
        child.stdin.write(b"\\n")
        child.stdin.close()
        while child.poll() is None:
            peaks.sample([child.pid])
            time.sleep(0.001)
        print(child.returncode, watch.explain(child.pid, child.returncode, peaks))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GIVE_UP_S, check=False)
    assert done.stdout.startswith(f"-9 {KERNEL_KILLED_IT}; its peak was "), done
    assert " MiB of the 64.0 MiB " in done.stdout
