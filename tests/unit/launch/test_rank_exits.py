"""Exit codes of ranks, noted by the process that is their parent as they exit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import GIVE_UP_S
from torchmuster.launch.node import engines
from torchmuster.launch.node.rank_exits import RankExits

Rank = subprocess.Popen[bytes]


@pytest.fixture
def exits(tmp_path: Path) -> Iterator[RankExits]:
    before = signal.getsignal(signal.SIGCHLD)
    watching = RankExits(tmp_path / "agent.json")
    watching.watch()
    yield watching
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def start(folder: Path, rank: int, code: str) -> Rank:
    """Start a process that exits once its standard input is closed, and leave the record that a rank leaves."""
    program = f"import os, signal, sys; sys.stdin.read(); {code}"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    (folder / f"rank-{rank}.json").write_text(json.dumps({"pid": process.pid}))
    return process


def let_go(process: Rank) -> None:
    assert process.stdin is not None
    process.stdin.close()


def wait_for_failures(folder: Path) -> dict[int, engines.RankExit]:
    """Wait without collecting a process, as torch does between two looks."""
    until = time.monotonic() + GIVE_UP_S
    while not (found := engines.agent_exits(folder)):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(3)", 3),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11),
    ],
)
def test_a_failure_is_written_while_another_rank_still_runs(
    folder: Path, exits: RankExits, code: str, expected: int
) -> None:
    failing, other = start(folder, 0, code), start(folder, 1, "pass")
    began = time.time()
    let_go(failing)
    (found,) = wait_for_failures(folder).items()
    assert (found[0], found[1].pid, found[1].code) == (0, failing.pid, expected)
    assert began <= found[1].at_unix_s <= time.time()
    assert failing.wait() == expected  # the exit code was left for whoever collects the process
    let_go(other)
    assert other.wait() == 0


def test_ranks_that_end_well_are_no_failures(folder: Path, exits: RankExits) -> None:
    well, failing = start(folder, 0, "pass"), start(folder, 1, "os._exit(2)")
    let_go(well)
    assert well.wait() == 0
    let_go(failing)
    assert list(wait_for_failures(folder)) == [1]
    failing.wait()


def test_what_torch_reports_is_added_and_comes_after_what_was_noted(
    folder: Path, exits: RankExits
) -> None:
    failing = start(folder, 1, "os._exit(2)")
    let_go(failing)
    noted = wait_for_failures(folder)[1]
    failing.wait()
    # torch counts in whole seconds, so the second seems to have been earlier
    torch_s = int(noted.at_unix_s)
    of_first = SimpleNamespace(pid=failing.pid, exitcode=2, timestamp=torch_s)
    of_second = SimpleNamespace(pid=77, exitcode=-15, timestamp=torch_s)
    exits.add_all({0: of_second, 1: of_first})  # type: ignore[dict-item]
    found = engines.agent_exits(folder)
    assert found[1] == noted
    assert (found[0].pid, found[0].code) == (77, -15)
    assert found[0].at_unix_s >= noted.at_unix_s


def test_ranks_that_ended_as_asked_are_taken_back(folder: Path, exits: RankExits) -> None:
    asked, failing = start(folder, 0, "pass"), start(folder, 1, "os._exit(2)")
    os.kill(asked.pid, signal.SIGTERM)
    assert wait_for_failures(folder)[0].code == -signal.SIGTERM
    let_go(failing)
    until = time.monotonic() + GIVE_UP_S
    while len(engines.agent_exits(folder)) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    exits.drop_ended_by(signal.SIGTERM)
    assert [(rank, one.code) for rank, one in engines.agent_exits(folder).items()] == [(1, 2)]
    for process in (asked, failing):
        let_go(process)
        process.wait()


def test_a_process_that_was_collected_is_left_to_torch(folder: Path, exits: RankExits) -> None:
    gone = start(folder, 0, "os._exit(2)")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    let_go(gone)
    assert gone.wait() == 2  # before anything was noted
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    other = start(folder, 1, "os._exit(3)")
    let_go(other)
    assert list(wait_for_failures(folder)) == [1]
    other.wait()
