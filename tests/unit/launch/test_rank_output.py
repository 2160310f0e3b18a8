"""The output of a rank: always read, whole in its log, bounded for the launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import GIVE_UP_S
from torchmuster.launch.node import output
from torchmuster.launch.node.output import RankLog


def drained(log: Path, data: bytes, **options: int) -> RankLog:
    """Return the output of a rank that wrote ``data`` and exited."""
    reading, writing = os.pipe()
    rank = RankLog(3, log, **options)
    rank.drain(reading, attempt=0)
    with os.fdopen(writing, "wb") as stream:
        stream.write(data)
    assert rank.ended.wait(GIVE_UP_S)
    return rank


def shown(rank: RankLog) -> str:
    """Return all that the launcher gets."""
    texts = []
    while text := rank.take(last=True):
        texts.append(text)
    return "".join(texts)


def test_output_is_logged_and_shown(tmp_path: Path) -> None:
    log = tmp_path / "rank-3.log"
    rank = drained(log, "é 1\nline 2\nno end".encode())
    assert rank.take() == "é 1\nline 2\n"
    assert rank.take() == ""
    assert rank.take(last=True) == "no end\n"
    assert log.read_text() == "é 1\nline 2\nno end"
    assert rank.last_lines() == "é 1\nline 2\nno end"


def test_restart_is_marked_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-3.log"
    log.write_text("first\n")
    reading, writing = os.pipe()
    rank = RankLog(3, log)
    rank.drain(reading, attempt=1)
    os.write(writing, b"second\n")
    os.close(writing)
    assert rank.ended.wait(GIVE_UP_S)
    first, mark, second = log.read_text().splitlines()
    assert (first, second) == ("first", "second")
    assert mark.startswith("--- restarted, ")
    assert rank.last_lines() == "second"


def test_rank_is_not_blocked_while_nobody_takes_its_output(tmp_path: Path) -> None:
    """As with a terminal that Ctrl-S stopped: what does not fit is left out of the console, and said."""
    log = tmp_path / "rank-3.log"
    lines = "".join(f"line {number:07}\n" for number in range(2_000_000))
    rank = drained(log, lines.encode())
    text = shown(rank)
    assert text.startswith("… ")
    assert f"see {log}\n" in text.splitlines(keepends=True)[0]
    assert text.endswith("line 1999999\n")
    assert len(text) < len(lines) / 2
    assert log.stat().st_size == len(lines)


def test_long_log_keeps_its_head_and_its_tail(tmp_path: Path) -> None:
    log = tmp_path / "rank-3.log"
    lines = [f"line {number:07}" for number in range(500_000)]
    drained(log, "\n".join(lines).encode(), limit_bytes=2**20)
    text = log.read_text()
    assert len(text) <= 2**20 + 200
    assert text.startswith("line 0000000\nline 0000001\n")
    assert "output left out here" in text
    assert text.endswith("line 0499998\nline 0499999")


def test_full_disk_loses_the_log_but_blocks_no_rank(tmp_path: Path) -> None:
    """With a file size limit as the full disk, in a process of its own."""
    code = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import resource, signal
from pathlib import Path
from test_rank_output import drained, shown
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
rank = drained(Path({str(tmp_path / "rank-3.log")!r}), b"a line\\n" * 100_000)
text = shown(rank)
assert len(text) > 700_000
assert "cannot write" in text
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert (tmp_path / "rank-3.log").stat().st_size == 100_000


def test_progress_bar_is_shown_from_time_to_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_PROGRESS_EVERY_S", 0.0)
    rank = drained(tmp_path / "rank-3.log", b"10 %\r20 %\r30")
    assert rank.take() == "20 %\n"
    assert rank.take(last=True) == "30\n"
