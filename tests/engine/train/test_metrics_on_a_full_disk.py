"""Lines that find no room wait, and are all in the file once there is some."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.train import reports
from torchmuster.train.reports import MetricsFiles

pytestmark = pytest.mark.engine


class Disk:
    """Takes so many bytes more, and then none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room_bytes = 10**6
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, file: int, data: bytes) -> int:
        if not self.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._write(file, data[: self.room_bytes])
        self.room_bytes -= taken
        return taken


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def _steps(folder: Path) -> list[int]:
    lines = (folder / "metrics" / "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_lines_wait_for_room_and_none_is_torn(
    tmp_path: Path, disk: Disk, snapshot: SnapshotAssertion
) -> None:
    files = MetricsFiles(tmp_path)
    assert files.add("evaluations", {"step": 1, "loss": 1.0}) is None
    disk.room_bytes = 20  # a part of the next line
    said = files.add("evaluations", {"step": 2, "loss": 1.0})
    assert said is not None
    assert "No space left on device" in said
    assert "training continues" in said
    assert files.add("evaluations", {"step": 3, "loss": 1.0}) is None, "it is said once"
    disk.room_bytes = 10**6
    said = files.add("evaluations", {"step": 4, "loss": 1.0})
    assert said is not None
    assert re.sub(r"\d+(\.\d+)? m?s\b", "TIME", said) == snapshot
    files.close()
    assert _steps(tmp_path) == [1, 2, 3, 4]


def test_what_waits_is_bounded_and_the_rest_is_counted(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_MOST_WAITING_BYTES", 200)
    files = MetricsFiles(tmp_path)
    disk.room_bytes = 0
    for step in range(1, 11):
        files.add("evaluations", {"step": step, "loss": 1.0})
    disk.room_bytes = 10**6
    said = files.add("evaluations", {"step": 11, "loss": 1.0})
    files.close()
    kept = _steps(tmp_path)
    assert said is not None
    assert kept == list(range(1, len(kept) + 1))
    assert f"{11 - len(kept)} lines were lost" in said
