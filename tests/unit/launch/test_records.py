"""What ranks and the agent wrote down of their ends becomes what the launcher is told."""

import json
import time
from pathlib import Path

import pytest

from torchmuster.launch import protocol
from torchmuster.launch.node import engines
from torchmuster.launch.node.engines import RankExit


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
    assert engines.rank_pids(folder) == {0: 100, 11: 111}


def test_a_rank_s_own_error_its_exit_its_log_and_the_machine_s_evidence_come_together(
    folder: Path,
) -> None:
    rank_failed(folder, 5, "ValueError: no", ago_s=3.0)
    (folder / "logs" / "rank-5.log").write_text("epoch 1\nValueError: no\n")
    (failure,) = engines.read_failure_files(
        folder,
        folder / "logs",
        range(4, 6),
        exits={5: RankExit(pid=9, code=1, at_unix_s=time.time())},
        evidence={5: "the kernel …"},
        peaks={5: 2**30},
        began={},
    )
    assert (failure.rank, failure.local_rank, failure.exit_code) == (5, 1, 1)
    assert failure.error == "ValueError: no"
    assert failure.last_lines == "epoch 1\nValueError: no"
    assert failure.evidence == "the kernel …"
    assert failure.peak_rss_bytes == 2**30
    # When it raised counts, not when somebody noticed.
    assert failure.ago_s > 2.9


def test_a_rank_without_an_error_of_its_own_is_told_by_its_exit(folder: Path) -> None:
    exits = {0: RankExit(pid=9, code=-9, at_unix_s=time.time() - 2)}
    (failure,) = engines.read_failure_files(folder, folder / "logs", [0, 1], exits, {}, {}, {})
    assert (failure.rank, failure.exit_code, failure.error) == (0, -9, "")
    assert (failure.last_lines, failure.peak_rss_bytes) == ("", None)
    assert failure.ago_s > 1.9


def test_a_rank_that_raised_but_was_ended_before_it_was_noticed_is_told_too(folder: Path) -> None:
    rank_failed(folder, 1, "RuntimeError: first", 1.0)
    exits = {0: RankExit(pid=9, code=1, at_unix_s=time.time())}
    told = engines.read_failure_files(folder, folder / "logs", [0, 1], exits, {}, {}, {})
    assert [(one.rank, one.error) for one in told] == [(0, ""), (1, "RuntimeError: first")]


def test_a_clock_that_was_set_back_gives_no_failure_in_the_future(folder: Path) -> None:
    rank_failed(folder, 0, "ValueError: no", ago_s=-3600)
    (failure,) = engines.read_failure_files(folder, folder / "logs", [0], {}, {}, {}, {})
    assert failure.ago_s == 0.0


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00"])
def test_a_damaged_record_is_no_record(folder: Path, content: str) -> None:
    (folder / "rank-0.error.json").write_text(content)
    (folder / "agent.json").write_text(content)
    assert engines.read_failure_files(folder, folder / "logs", [0], {}, {}, {}, {}) == []
    assert engines.agent_exits(folder) == {}


def test_the_agent_s_list_of_failures(folder: Path) -> None:
    failures = [{"rank": 1, "pid": 77, "exit_code": -11, "at_unix_s": 12.5}]
    (folder / "agent.json").write_text(json.dumps({"failures": failures}))
    assert engines.agent_exits(folder) == {1: RankExit(pid=77, code=-11, at_unix_s=12.5)}


def test_of_a_long_log_the_end_is_told(folder: Path) -> None:
    log = folder / "rank-0.log"
    log.write_text("".join(f"line {number} é\n" for number in range(100_000)))
    lines = engines.last_output_lines(log, 0).splitlines()
    assert lines[-1] == "line 99999 é"
    assert 10 < len(lines) < 100
    assert engines.last_output_lines(folder / "nowhere.log", 0) == ""


def test_what_an_earlier_attempt_wrote_is_not_told_of_this_one(folder: Path) -> None:
    log = folder / "logs" / "rank-0.log"
    log.write_text("ValueError: of the first attempt\n")
    began = {0: log.stat().st_size}
    exits = {0: RankExit(pid=9, code=3, at_unix_s=time.time())}
    (silent,) = engines.read_failure_files(folder, folder / "logs", [0], exits, {}, {}, began)
    assert silent.last_lines == ""
    with log.open("a") as stream:
        stream.write("second attempt\n")
    (spoke,) = engines.read_failure_files(folder, folder / "logs", [0], exits, {}, {}, began)
    assert spoke.last_lines == "second attempt"


def test_of_very_many_failures_the_first_are_told_whole_and_all_by_their_error(
    folder: Path,
) -> None:
    ranks = range(40)
    for rank in ranks:
        rank_failed(folder, rank, f"ValueError: {rank}", ago_s=100.0 - rank)
        (folder / "logs" / f"rank-{rank}.log").write_text("the log\n")
    told = engines.read_failure_files(folder, folder / "logs", ranks, {}, {}, {}, {})
    assert [one.error for one in told] == [f"ValueError: {rank}" for rank in ranks]
    assert all(one.traceback and one.last_lines for one in told[:16])
    assert not any(one.traceback or one.last_lines for one in told[16:])


def test_the_log_of_a_rank_that_left_no_error_is_told_however_many_fail(folder: Path) -> None:
    # It is all that says what happened: an abort after a timeout is not a cause of its own.
    ranks = range(40)
    exits = {rank: RankExit(pid=9, code=-6, at_unix_s=time.time() - rank) for rank in ranks}
    for rank in ranks:
        (folder / "logs" / f"rank-{rank}.log").write_text("what():  timed out\n")
    told = engines.read_failure_files(folder, folder / "logs", ranks, exits, {}, {}, {})
    assert {one.last_lines for one in told} == {"what():  timed out"}


def test_an_error_with_a_name_that_is_not_utf_8_can_be_told(folder: Path) -> None:
    rank_failed(folder, 0, "ValueError: caf\udce9", ago_s=1.0)
    (failure,) = engines.read_failure_files(folder, folder / "logs", [0], {}, {}, {}, {})
    assert failure.error == "ValueError: caf\\udce9"
    assert protocol.encode(protocol.Ended(attempt=0, good=False, failures=(failure,)))


def test_an_end_always_fits_into_a_message() -> None:
    def failure(rank: int) -> protocol.Failure:
        return protocol.Failure(
            rank=rank,
            local_rank=rank,
            exit_code=1,
            ago_s=float(rank),
            error=f"ValueError: {rank} " + "é" * 4000,
            traceback="é" * 16000,
            last_lines="é" * 8000,
        )

    small = protocol.Ended(attempt=2, good=False, failures=(failure(0), failure(1)))
    assert engines.fitting_failures(small) is small
    large = protocol.Ended(attempt=2, good=False, failures=tuple(map(failure, range(128))))
    assert len(protocol.to_lines(large)) > protocol.MESSAGE_LIMIT
    fitted = engines.fitting_failures(large)
    assert len(protocol.to_lines(fitted)) < protocol.MESSAGE_LIMIT
    assert (fitted.attempt, fitted.good, len(fitted.failures)) == (2, False, 128)
    assert fitted.failures[127] == large.failures[127]  # the first that failed
    assert fitted.failures[5].error.startswith("ValueError: 5 ")


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (None, 75),  # the agent was ended before it looked
        (RankExit(pid=9, code=-15, at_unix_s=0.0), 75),  # it was sent a signal on its way out
        (RankExit(pid=9, code=75, at_unix_s=0.0), 75),
    ],
)
def test_a_rank_that_saved_is_known_by_what_it_wrote(
    folder: Path, seen: RankExit | None, told: int
) -> None:
    record = {"error": "the script exited with: 75", "what": "saved at step 3", "exit_code": 75}
    (folder / "rank-0.error.json").write_text(json.dumps(record))
    (failure,) = engines.read_failure_files(
        folder,
        folder / "logs",
        [0],
        exits={} if seen is None else {0: seen},
        evidence={},
        peaks={},
        began={},
    )
    assert (failure.exit_code, failure.what) == (told, "saved at step 3")
