"""/dev/shm: a container's, a full one, one with what dead processes left."""

import mmap
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import all_well, made_up_machine, only
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine.shared_memory import CHECKS
from torchmuster.finding import Status
from torchmuster.units import GiB, MiB

(CHECK,) = CHECKS


@pytest.fixture
def machine(tmp_path: Path) -> Surroundings:
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")  # that of the machine itself
    return made_up_machine(tmp_path)


def set_room(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    room = SimpleNamespace(f_frsize=1, f_blocks=total, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda _: room)


def leave(machine: Surroundings, name: str, size: int, age_s: float = 3600) -> None:
    path = machine.path(f"/dev/shm/{name}")
    path.write_bytes(b"\1" * size)
    os.utime(path, (time.time() - age_s,) * 2)


def test_enough(machine: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    set_room(monkeypatch, 8 * GiB, 7 * GiB)
    seen = all_well(CHECK, machine)
    assert "8.0 GiB" in seen
    assert "7.0 GiB" in seen


def test_what_a_container_gets_by_default(
    machine: Surroundings, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    set_room(monkeypatch, 64 * MiB, 64 * MiB)
    finding = only(CHECK, machine)
    assert (finding.name, finding.status) == ("shared-memory-small", Status.WARNING)
    assert "64.0 MiB" in finding.what
    assert finding == snapshot
    assert "docker run --shm-size=8g" in finding.fix
    assert "sudo mount -o remount,size=90% /dev/shm" in finding.fix


def test_just_more_than_a_containers_default_is_fine(
    machine: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_room(monkeypatch, 128 * MiB, 127 * MiB)
    all_well(CHECK, machine)


def test_missing(tmp_path: Path) -> None:
    finding = only(CHECK, made_up_machine(tmp_path))
    assert (finding.name, finding.status) == ("shared-memory-missing", Status.FAILURE)
    assert "mount -t tmpfs" in finding.fix


@pytest.mark.parametrize(("free", "status"), [(0, Status.FAILURE), (20 * MiB, Status.WARNING)])
def test_full(
    machine: Surroundings,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    status: Status,
    snapshot: SnapshotAssertion,
) -> None:
    set_room(monkeypatch, 8 * GiB, free)
    leave(machine, "torch_999999_1234_0", 3 * MiB)
    finding = only(CHECK, machine)
    assert (finding.name, finding.status) == ("shared-memory-full", status)
    owner = f"user id {os.geteuid()}"
    assert owner in finding.why
    assert finding.fix == "rm /dev/shm/torch_999999_1234_0"
    assert replace(finding, why=finding.why.replace(owner, "user id UID")) == snapshot


def test_full_of_what_is_in_use(machine: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    set_room(monkeypatch, 8 * GiB, 0)
    leave(machine, "torch_999998_1_0", MiB)
    leave(machine, "torch_999999_1_0", MiB)
    leave(machine, "data-of-somebody", MiB)
    maps = "7f00-7f01 rw-s 00000000 00:1a 5 /dev/shm/torch_999998_1_0\n"
    made_up_machine(machine.root, {"proc/77/maps": maps})
    (machine.root / "proc/77/fd").mkdir()
    (machine.root / "proc/77/fd/5").symlink_to("/dev/shm/torch_999999_1_0")
    finding = only(CHECK, machine)
    assert "rm" not in finding.fix.split()
    assert finding.fix.startswith("ls -lS /dev/shm")


def test_nothing_is_removed_whose_maker_may_be_alive(
    machine: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_room(monkeypatch, 8 * GiB, 0)
    for alive in (4242, 0x1A2B):
        (machine.root / f"proc/{alive}").mkdir()
    for name in ("torch_4242_1_0", "__KMP_REGISTERED_LIB_4242_0", "cuda.shm.0.1a2b.1"):
        leave(machine, name, MiB)
    for name in ("psm_0123abcd", "nccl-a1b2c3"):  # who made them is not known
        leave(machine, name, MiB)
    assert only(CHECK, machine).fix.startswith("ls -lS /dev/shm")
    leave(machine, "cuda.shm.0.1a2c.1", MiB)
    assert only(CHECK, machine).fix == "rm /dev/shm/cuda.shm.0.1a2c.1"


def test_in_a_container_the_files_of_other_containers_are_left_alone(
    machine: Surroundings, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    namespace = machine.path("/proc/self/ns/pid")
    namespace.unlink()
    namespace.symlink_to("pid:[4026532211]")  # processes of others cannot be seen from here
    set_room(monkeypatch, 8 * GiB, 0)
    leave(machine, "torch_999999_1_0", MiB)
    finding = only(CHECK, machine)
    assert finding.fix.startswith("ls -lS /dev/shm")
    assert "torch_999999_1_0" not in finding.fix
    assert finding == snapshot


def test_what_is_left_behind_is_worth_a_note(
    machine: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchmuster.diagnose.machine.shared_memory._CONTAINER_DEFAULT_BYTES", MiB)
    set_room(monkeypatch, 8 * GiB, 7 * GiB)
    leave(machine, "torch_999999_1_0", 2 * MiB)
    leave(machine, "__KMP_REGISTERED_LIB_999999_0", 1024)
    leave(machine, "torch_999999_2_0", 2 * MiB, age_s=1)  # may be in the making
    finding = only(CHECK, machine)
    assert (finding.name, finding.status) == ("shared-memory-stale", Status.NOTE)
    assert "torch_999999_1_0" in finding.fix
    assert "torch_999999_2_0" not in finding.fix


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory here")
def test_a_file_that_a_real_process_has_mapped_is_in_use() -> None:
    from torchmuster.diagnose.machine.shared_memory import _in_use

    path = Path(f"/dev/shm/psm_test{os.getpid()}")
    with path.open("w+b") as stream:
        try:
            stream.truncate(4096)
            with mmap.mmap(stream.fileno(), 4096):
                assert str(path) in _in_use(Path("/proc"))
        finally:
            path.unlink()
