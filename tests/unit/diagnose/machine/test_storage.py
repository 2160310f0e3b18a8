"""Storage: folders that cannot be written, disks without room, caches, a slow disk."""

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import all_well, made_up_machine, only
from torchmuster.diagnose.check import Cost
from torchmuster.diagnose.machine import storage
from torchmuster.diagnose.machine.storage import CHECKS, Speed
from torchmuster.finding import Status
from torchmuster.units import GiB, MiB

RUN_FOLDER, TEMPORARY, SPEED = CHECKS


def set_room(monkeypatch: pytest.MonkeyPatch, *, free: int) -> None:
    room = SimpleNamespace(f_frsize=1, f_blocks=100 * GiB, f_bfree=free, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda _: room)


def refuse_writing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(**_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)


def test_room_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_room(monkeypatch, free=72 * GiB)
    machine = made_up_machine(tmp_path)
    assert all_well(RUN_FOLDER, machine) == f"{tmp_path}: 72.0 GiB free, writable"
    assert list(tmp_path.iterdir()) == []  # nothing is left of the try


def test_a_folder_that_will_be_made(tmp_path: Path) -> None:
    machine = made_up_machine(tmp_path)
    machine = type(machine)(root=tmp_path, folder=tmp_path / "new/runs", outputs={}, environment={})
    all_well(RUN_FOLDER, machine)
    all_well(SPEED, machine)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("free", "status"), [(MiB, Status.FAILURE), (500 * MiB, Status.WARNING)])
def test_little_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    status: Status,
    snapshot: SnapshotAssertion,
) -> None:
    set_room(monkeypatch, free=free)
    finding = only(RUN_FOLDER, made_up_machine(tmp_path))
    assert (finding.name, finding.status) == ("run-folder-full", status)
    assert str(tmp_path) in finding.what
    assert finding.fix.startswith(f"du -xh --max-depth=2 {tmp_path}")
    assert finding == snapshot


def test_no_room_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    set_room(monkeypatch, free=0)
    refuse_writing(monkeypatch, errno.ENOSPC)
    finding = only(RUN_FOLDER, made_up_machine(tmp_path))
    assert (finding.name, finding.status) == ("run-folder-full", Status.FAILURE)
    assert "0 B of 100 GiB" in finding.what
    assert finding == snapshot


@pytest.mark.parametrize(
    ("number", "name", "fix"),
    [
        (errno.EROFS, "run-folder-read-only", "sudo dmesg | tail"),
        (errno.EDQUOT, "run-folder-quota", "quota -s"),
        (errno.EACCES, "run-folder-not-writable", "mkdir -p ~/runs"),
        (errno.EPERM, "run-folder-not-writable", "mkdir -p ~/runs"),
        (errno.EIO, "run-folder-not-writable", "sudo dmesg | tail"),
        (errno.ESTALE, "run-folder-not-writable", "sudo dmesg | tail"),
    ],
    ids=["EROFS", "EDQUOT", "EACCES", "EPERM", "EIO", "ESTALE"],
)
def test_nothing_can_be_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    name: str,
    fix: str,
    snapshot: SnapshotAssertion,
) -> None:
    set_room(monkeypatch, free=64 * MiB)  # little room is not what is wrong here
    refuse_writing(monkeypatch, number)
    finding = only(RUN_FOLDER, made_up_machine(tmp_path))
    assert (finding.name, finding.status) == (name, Status.FAILURE)
    assert finding.fix.startswith(fix)
    assert "muster run --runs ~/runs" in finding.fix
    assert "chown" not in finding.fix
    assert "chmod" not in finding.fix
    assert finding == snapshot


def test_a_disk_is_made_writable_again_only_after_a_look_at_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_writing(monkeypatch, errno.EROFS)
    *_, last = only(RUN_FOLDER, made_up_machine(tmp_path)).fix.splitlines()
    assert last.startswith("sudo mount -o remount,rw ")
    assert f'"$(stat -c %m {tmp_path})"  #' in last


def test_temporary_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    refuse_writing(monkeypatch, errno.EACCES)
    # The folder of a test may have a long name, which is told as well.
    finding = next(iter(TEMPORARY.run(made_up_machine(tmp_path))))
    assert (finding.name, finding.status) == ("temporary-folder-not-writable", Status.FAILURE)
    assert finding.fix == "export TMPDIR=/var/tmp"  # a folder of somebody's is not made everybody's


@pytest.mark.parametrize(("folder", "other"), [("/tmp", "/var/tmp"), ("/var/tmp", "/tmp")])
def test_everybodys_temporary_folder_is_given_back_to_everybody(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    other: str,
) -> None:
    refuse_writing(monkeypatch, errno.EACCES)
    finding = only(TEMPORARY, made_up_machine(tmp_path, environment={"TMPDIR": folder}))
    opened, moved = finding.fix.splitlines()
    assert opened.startswith(f"sudo chmod 1777 {folder} ")
    assert moved == f"export TMPDIR={other}"


def test_a_slow_disk_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = [Speed(bytes_per_s=9e6, sync_s=0.9), Speed(bytes_per_s=300e6, sync_s=0.001)]
    monkeypatch.setattr(storage, "_try", lambda _: tries.pop(0))
    monkeypatch.setattr(storage, "_PAUSE_S", 0.0)
    assert "286 MiB/s" in all_well(SPEED, made_up_machine(tmp_path))
    assert tries == []


@pytest.mark.parametrize(
    ("rate", "sync_s", "what"),
    [(2e6, 0.001, "1.9 MiB/s"), (300e6, 0.8, "800.0 ms")],
    ids=["rate", "sync"],
)
def test_a_disk_that_stays_slow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    sync_s: float,
    what: str,
    snapshot: SnapshotAssertion,
) -> None:
    monkeypatch.setattr(storage, "_try", lambda _: Speed(bytes_per_s=rate, sync_s=sync_s))
    monkeypatch.setattr(storage, "_PAUSE_S", 0.0)
    finding = only(SPEED, made_up_machine(tmp_path))
    assert (finding.name, finding.status) == ("disk-slow", Status.WARNING)
    assert what in finding.what
    assert "muster run --runs /scratch/runs" in finding.fix
    assert finding == snapshot


def test_the_real_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    speed = storage.measure_disk_speed(tmp_path)
    assert speed.bytes_per_s > 0
    assert speed.sync_s > 0
    assert list(tmp_path.iterdir()) == []
    assert SPEED.cost is Cost.SECONDS
