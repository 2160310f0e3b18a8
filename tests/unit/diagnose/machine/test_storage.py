"""Storage: folders that cannot be written, disks without room, caches, a slow disk."""

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import made_up_machine, only
from torchmuster.diagnose.machine.storage import CHECKS
from torchmuster.finding import Status
from torchmuster.units import GiB, MiB

RUN_FOLDER, TEMPORARY = CHECKS


def set_room(monkeypatch: pytest.MonkeyPatch, *, free: int) -> None:
    room = SimpleNamespace(f_frsize=1, f_blocks=100 * GiB, f_bfree=free, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda _: room)


def refuse_writing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(**_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)


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


def test_temporary_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    refuse_writing(monkeypatch, errno.EACCES)
    # The folder of a test may have a long name, which is told as well.
    finding = next(iter(TEMPORARY.run(made_up_machine(tmp_path))))
    assert (finding.name, finding.status) == ("temporary-folder-not-writable", Status.FAILURE)
    assert finding.fix == "export TMPDIR=/var/tmp"  # a folder of somebody's is not made everybody's
