"""Logs take no more disk space than allowed, and keep their beginning and end."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchmuster.launch.launcher.rank_logs import RankLogs
from torchmuster.launch.log_limit import limit_log
from torchmuster.launch.node.attempt import Tail

MIB = 2**20


def _disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def _lines(first: int, count: int) -> bytes:
    return b"".join(
        b"line %020d %s\n" % (number, b"x" * 74) for number in range(first, first + count)
    )


def test_the_middle_is_freed_and_writers_go_on(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    with path.open("ab", buffering=0) as rank:
        for piece in range(30):
            rank.write(_lines(piece * 10_000, 10_000))
            limit_log(path, 4 * MIB)
            assert _disk(path) <= 4 * MIB + MIB
    text = path.read_bytes()
    assert len(text) == 30 * 10_000 * 101
    assert text.startswith(_lines(0, 10_000))
    assert text.endswith(_lines(290_000, 10_000))
    assert text.count(b"--- output left out here") == 1


def test_small_logs_and_unread_output_stay(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(_lines(0, 20_000))
    assert not limit_log(path, 4 * MIB)
    assert not limit_log(path, MIB, read_to=100)
    assert limit_log(path, MIB, read_to=MIB)
    assert path.read_bytes()[MIB:] == _lines(0, 20_000)[MIB:]
    with pytest.raises(OSError, match="missing"):
        limit_log(tmp_path / "missing.log", MIB)


def test_a_file_system_without_holes_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(*_: object) -> None:
        tried.append(1)
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("torchmuster.launch.log_limit._free", refuse)
    path = tmp_path / "rank-0.log"
    tail = Tail(0, path)
    path.write_bytes(_lines(0, 40_000))
    while tail.read(0.0):
        pass
    assert [tail.keep_within(MIB) for _ in range(3)] == [0, 0, 0]
    assert len(tried) == 1


def test_a_rank_that_prints_faster_than_it_is_read_is_bounded(tmp_path: Path) -> None:
    """The writer appends with its own descriptor, as ranks do."""
    path = tmp_path / "rank-0.log"
    tail = Tail(0, path)
    program = "import os, sys\nfd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\nfor n in range(200): os.write(fd, (b'%070d\\n' % n) * 3000)"
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)])
    skipped, seen = 0, ""
    while writer.poll() is None:
        seen = tail.read(0.0) or seen
        skipped += tail.keep_within(8 * MIB)
    while text := tail.read(0.0):
        seen = text
        skipped += tail.keep_within(8 * MIB)
    assert writer.returncode == 0
    assert _disk(path) <= 10 * MIB
    assert seen.rstrip().endswith("199")
    assert skipped > 0
    assert "\0" not in seen


def test_logs_of_other_hosts_are_bounded(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path, pytest.fail, limit_bytes=2 * MIB)
    for _ in range(100):
        logs.write(3, "y" * 99_999 + "\n")
    logs.close()
    path = tmp_path / "rank-3.log"
    assert path.stat().st_size == 100 * 100_000
    assert _disk(path) <= 3 * MIB
