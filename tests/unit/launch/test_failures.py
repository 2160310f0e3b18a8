"""The reports of ranks that failed."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from torchmuster.launch import protocol
from torchmuster.launch.node import failures
from torchmuster.launch.node.memory_evidence import MemoryPeaks, MemoryWatch
from torchmuster.launch.node.output import RankLog
from torchmuster.launch.node.ranks import RankExit, RankProcess


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


class ExitedRank(RankProcess):
    """A rank that has exited, or of which no exit is known."""

    def __init__(self, rank: int, rank_exit: RankExit | None, last_lines: str) -> None:
        self.rank = rank
        self.exit = rank_exit
        self.output = RankLog(rank, Path("unused"))
        self.output._end = last_lines.encode()

    @property
    def pid(self) -> int:
        return 9


def read(
    folder: Path,
    ranks: Iterable[int],
    exits: Mapping[int, RankExit],
    last_lines: Mapping[int, str] = MappingProxyType({}),
) -> list[protocol.Failure]:
    """Return the failures of ranks that exited in these ways."""
    exited = [ExitedRank(rank, exits.get(rank), last_lines.get(rank, "")) for rank in ranks]
    return failures.failures_of(exited, folder, MemoryWatch.begin(), MemoryPeaks())


def rank_failed(folder: Path, rank: int, error: str, ago_s: float) -> None:
    record = {
        "error": error,
        "traceback": f"Traceback …\n{error}",
        "at_unix_s": time.time() - ago_s,
    }
    (folder / f"rank-{rank}.error.json").write_text(json.dumps(record))


def test_a_rank_s_own_error_its_exit_its_log_and_the_machine_s_evidence_come_together(
    folder: Path,
) -> None:
    rank_failed(folder, 5, "ValueError: no", ago_s=3.0)
    exits = {
        4: RankExit(code=0, at_unix_s=time.time()),
        5: RankExit(code=1, at_unix_s=time.time()),
    }
    (failure,) = read(folder, [4, 5], exits, {5: "epoch 1\nValueError: no\n"})
    assert (failure.rank, failure.exit_code) == (5, 1)
    assert failure.error == "ValueError: no"
    assert failure.last_lines == "epoch 1\nValueError: no"
    # When it raised counts, not when somebody noticed.
    assert failure.ago_s > 2.9


def test_a_rank_without_an_error_of_its_own_is_told_by_its_exit(folder: Path) -> None:
    exits = {0: RankExit(code=-9, at_unix_s=time.time() - 2)}
    (failure,) = read(folder, [0, 1], exits)
    assert (failure.rank, failure.exit_code, failure.error) == (0, -9, "")
    assert failure.last_lines == ""
    assert failure.ago_s > 1.9


def test_a_rank_that_raised_but_was_ended_before_it_was_noticed_is_told_too(folder: Path) -> None:
    rank_failed(folder, 1, "RuntimeError: first", 1.0)
    exits = {0: RankExit(code=1, at_unix_s=time.time())}
    told = read(folder, [0, 1], exits)
    assert [(one.rank, one.error) for one in told] == [(1, "RuntimeError: first"), (0, "")]


def test_a_clock_that_was_set_back_gives_no_failure_in_the_future(folder: Path) -> None:
    rank_failed(folder, 0, "ValueError: no", ago_s=-3600)
    (failure,) = read(folder, [0], {})
    assert failure.ago_s == 0.0


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "\x00", '{"at_unix_s": "long ago"}', '{"error": []}']
)
def test_a_damaged_record_is_no_record(folder: Path, content: str) -> None:
    (folder / "rank-0.error.json").write_text(content)
    assert read(folder, [0], {}) == []


def test_a_program_s_record_by_torch_is_read(folder: Path) -> None:
    extra = {"py_callstack": "Traceback …", "timestamp": str(int(time.time()) - 50)}
    message = {"message": "ValueError: no data", "extraInfo": extra}
    (folder / "rank-0.torchelastic.json").write_text(json.dumps({"message": message}))
    (failure,) = read(folder, [0], {})
    assert (failure.error, failure.traceback) == ("ValueError: no data", "Traceback …")
    assert 49 < failure.ago_s < 60


@pytest.mark.parametrize("message", ["text", {"message": []}, {"extraInfo": {"timestamp": "x"}}])
def test_a_damaged_record_by_torch_is_no_record(folder: Path, message: object) -> None:
    (folder / "rank-0.torchelastic.json").write_text(json.dumps({"message": message}))
    assert read(folder, [0], {}) == []


def test_of_very_many_failures_the_first_are_told_whole_and_all_by_their_error(
    folder: Path,
) -> None:
    ranks = range(40)
    for rank in ranks:
        rank_failed(folder, rank, f"ValueError: {rank}", ago_s=100.0 - rank)
    told = read(folder, ranks, {}, dict.fromkeys(ranks, "the log\n"))
    assert [one.error for one in told] == [f"ValueError: {rank}" for rank in ranks]
    assert all(one.traceback and one.last_lines for one in told[:4])
    assert not any(one.traceback or one.last_lines for one in told[4:])


def test_the_log_of_a_rank_that_left_no_error_is_told_however_many_fail(folder: Path) -> None:
    # It is all that says what happened: an abort after a timeout is not a cause of its own.
    ranks = range(40)
    exits = {rank: RankExit(code=-6, at_unix_s=time.time() - rank) for rank in ranks}
    told = read(folder, ranks, exits, dict.fromkeys(ranks, "what():  timed out\n"))
    assert {one.last_lines for one in told} == {"what():  timed out"}


def test_an_error_with_a_name_that_is_not_utf_8_can_be_told(folder: Path) -> None:
    rank_failed(folder, 0, "ValueError: caf\udce9", ago_s=1.0)
    (failure,) = read(folder, [0], {})
    assert failure.error == "ValueError: caf\\udce9"
    assert protocol.encode(protocol.Ended(attempt=0, good=False, failures=(failure,)))


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (None, 75),  # the agent was ended before it looked
        (RankExit(code=-15, at_unix_s=0.0), 75),  # it was sent a signal on its way out
        (RankExit(code=75, at_unix_s=0.0), 75),
    ],
)
def test_a_rank_that_saved_is_known_by_what_it_wrote(
    folder: Path, seen: RankExit | None, told: int
) -> None:
    record = {"error": "", "what": "saved at step 3", "exit_code": 75}
    (folder / "rank-0.error.json").write_text(json.dumps(record))
    (failure,) = read(folder, [0], {} if seen is None else {0: seen})
    assert (failure.exit_code, failure.what) == (told, "saved at step 3")
