"""What ranks and the agent wrote down of their ends becomes what the launcher is told."""

import json
import time
from pathlib import Path

import pytest

from torchmuster.launch.keeper import records
from torchmuster.launch.keeper.records import Exit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def rank_began(folder: Path, rank: int, pid: int) -> None:
    (folder / f"rank-{rank}.json").write_text(json.dumps({"pid": pid, "at_unix_s": time.time()}))


def rank_failed(folder: Path, rank: int, error: str, ago_s: float) -> None:
    record = {
        "error": error,
        "traceback": f"Traceback …\n{error}",
        "at_unix_s": time.time() - ago_s,
    }
    (folder / f"rank-{rank}.error.json").write_text(json.dumps(record))


def test_the_processes_of_the_ranks_that_have_begun(folder: Path) -> None:
    rank_began(folder, 0, 100)
    rank_began(folder, 11, 111)
    rank_failed(folder, 0, "ValueError: no", 1.0)
    (folder / "agent.json").write_text("{}")
    (folder / ".rank-3.json").write_text('{"pid": 5}')  # still being written
    assert records.pids(folder) == {0: 100, 11: 111}


def test_a_rank_s_own_error_its_exit_its_log_and_the_machine_s_evidence_come_together(
    folder: Path,
) -> None:
    rank_failed(folder, 5, "ValueError: no", ago_s=3.0)
    (folder / "logs" / "rank-5.log").write_text("epoch 1\nValueError: no\n")
    (failure,) = records.failures(
        folder,
        folder / "logs",
        range(4, 6),
        exits={5: Exit(pid=9, code=1, at_unix_s=time.time())},
        evidence={5: "the kernel …"},
        peaks={5: 2**30},
    )
    assert (failure.rank, failure.local_rank, failure.exit_code) == (5, 1, 1)
    assert failure.error == "ValueError: no"
    assert failure.last_lines == "epoch 1\nValueError: no"
    assert failure.evidence == "the kernel …"
    assert failure.peak_rss_bytes == 2**30
    # When it raised counts, not when somebody noticed.
    assert 2.9 < failure.ago_s < 10


def test_a_rank_without_an_error_of_its_own_is_told_by_its_exit(folder: Path) -> None:
    exits = {0: Exit(pid=9, code=-9, at_unix_s=time.time() - 2)}
    (failure,) = records.failures(folder, folder / "logs", [0, 1], exits, {}, {})
    assert (failure.rank, failure.exit_code, failure.error) == (0, -9, "")
    assert (failure.last_lines, failure.peak_rss_bytes) == ("", None)
    assert 1.9 < failure.ago_s < 10


def test_a_rank_that_raised_but_was_ended_before_it_was_noticed_is_told_too(folder: Path) -> None:
    rank_failed(folder, 1, "RuntimeError: first", 1.0)
    exits = {0: Exit(pid=9, code=1, at_unix_s=time.time())}
    told = records.failures(folder, folder / "logs", [0, 1], exits, {}, {})
    assert [(one.rank, one.error) for one in told] == [(0, ""), (1, "RuntimeError: first")]


def test_a_clock_that_was_set_back_gives_no_failure_in_the_future(folder: Path) -> None:
    rank_failed(folder, 0, "ValueError: no", ago_s=-3600)
    (failure,) = records.failures(folder, folder / "logs", [0], {}, {}, {})
    assert failure.ago_s == 0.0


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00"])
def test_a_damaged_record_is_no_record(folder: Path, content: str) -> None:
    (folder / "rank-0.error.json").write_text(content)
    (folder / "agent.json").write_text(content)
    assert records.failures(folder, folder / "logs", [0], {}, {}, {}) == []
    assert records.agent_exits(folder) == {}


def test_the_agent_s_list_of_failures(folder: Path) -> None:
    failures = [{"rank": 1, "pid": 77, "exit_code": -11, "at_unix_s": 12.5}]
    (folder / "agent.json").write_text(json.dumps({"failures": failures}))
    assert records.agent_exits(folder) == {1: Exit(pid=77, code=-11, at_unix_s=12.5)}


def test_of_a_long_log_the_end_is_told(folder: Path) -> None:
    log = folder / "rank-0.log"
    log.write_text("".join(f"line {number} é\n" for number in range(100_000)))
    lines = records.last_lines(log).splitlines()
    assert lines[-1] == "line 99999 é"
    assert 10 < len(lines) < 100
    assert records.last_lines(folder / "nowhere.log") == ""
