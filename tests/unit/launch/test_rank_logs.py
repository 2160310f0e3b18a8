"""The logs of other machines' ranks: whole, in order, and never in the launcher's way."""

import os
import time
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.launch.launcher.rank_logs import RankLogs


def test_every_rank_s_words_are_in_its_log_in_order(tmp_path: Path) -> None:
    (tmp_path / "rank-3.log").write_text("first attempt\n")
    logs = RankLogs(tmp_path, lambda _: None)
    for number in range(3):
        for rank in range(200):  # more than are kept open
            logs.write(rank, f"é {number}\n")
    logs.close(GIVE_UP_S)
    assert (tmp_path / "rank-3.log").read_text() == "first attempt\né 0\né 1\né 2\n"
    assert {path.read_text() for path in tmp_path.iterdir() if path.name != "rank-3.log"} == {
        "é 0\né 1\né 2\n"
    }


def test_a_disk_that_stands_still_does_not_hold_up_the_launcher(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    log = tmp_path / "rank-0.log"
    os.mkfifo(log)  # takes nothing until somebody reads
    said: list[str] = []
    logs = RankLogs(tmp_path, said.append)
    for _ in range(1000):
        logs.write(0, "x" * 1000 + "\n")
    logs.close(patience_s=0.2)
    (told,) = said
    assert told.replace(str(tmp_path), "LOGS") == snapshot
    with log.open() as stream:
        assert len(stream.read().splitlines()) == 1000


def test_a_slow_disk_is_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "rank-0.log"
    os.mkfifo(log)
    said: list[str] = []
    logs = RankLogs(tmp_path, said.append)
    sent = [f"{number:05}" + "x" * 60_000 + "\n" for number in range(20)]
    for text in sent:
        logs.write(0, text)
    read: list[str] = []
    writer = logs._thread
    assert writer is not None

    with log.open() as stream:

        def take_one(patience_s: float) -> None:
            """Take one text in the time of one's patience, as much as this pipe then has room for."""
            read.append(stream.readline())
            deadline = time.monotonic() + GIVE_UP_S
            while logs._written <= len(read) and writer.is_alive():
                assert time.monotonic() < deadline
                time.sleep(0.001)

        monkeypatch.setattr(writer, "join", take_one)
        logs.close(patience_s=0.5)
        read += stream
    monkeypatch.undo()
    writer.join(GIVE_UP_S)
    assert (read, said) == (sent, [])


def test_a_log_that_cannot_be_written_is_told_once_and_the_others_go_on(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / "rank-0.log").mkdir()
    said: list[str] = []
    logs = RankLogs(tmp_path, said.append)
    for _ in range(3):
        logs.write(0, "lost\n")
        logs.write(1, "kept\n")
    logs.close(GIVE_UP_S)
    (told,) = said
    assert told.replace(str(tmp_path), "LOGS") == snapshot
    assert "rank-0.log" in told
    assert (tmp_path / "rank-1.log").read_text() == "kept\n" * 3


@pytest.mark.timeout(120)
def test_words_can_be_read_at_once(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path, lambda _: None)
    logs.write(0, "now\n")
    log = tmp_path / "rank-0.log"
    while not (log.exists() and log.read_text() == "now\n"):
        time.sleep(0.01)
    logs.close()


def test_where_nothing_was_written_there_is_nothing_to_close(tmp_path: Path) -> None:
    RankLogs(tmp_path, lambda _: None).close()
    assert list(tmp_path.iterdir()) == []
