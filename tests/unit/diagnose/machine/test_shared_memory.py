"""/dev/shm: a container's, a full one."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import made_up_machine, only
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine.shared_memory import CHECKS
from torchmuster.finding import Status
from torchmuster.units import GiB, MiB

(CHECK,) = CHECKS


@pytest.fixture
def machine(tmp_path: Path) -> Surroundings:
    (tmp_path / "dev/shm").mkdir(parents=True)
    return made_up_machine(tmp_path)


def set_room(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    room = SimpleNamespace(f_frsize=1, f_blocks=total, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda _: room)


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
    finding = only(CHECK, machine)
    assert (finding.name, finding.status) == ("shared-memory-full", status)
    assert finding.fix.startswith("ls -lS /dev/shm")
    assert finding == snapshot
