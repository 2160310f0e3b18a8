"""What a node agent adds to its ranks' heartbeats, and how it gets them to show what they are doing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import GIVE_UP_S
from torchmuster.launch import protocol
from torchmuster.launch.node import heartbeats, stack_dump
from torchmuster.launch.node.heartbeats import HeartbeatReader
from torchmuster.launch.node.ranks import RankProcess

_RANK = """\
import ctypes, os, sys, time
from pathlib import Path
from torchmuster.launch.rank import heartbeat
heartbeat._EVERY_S = 0.05
heartbeat.start_heartbeat(int(sys.argv[2]), Path(sys.argv[1]))
def in_user_code():
    time.sleep(0.2)
    print("here", flush=True)
    if sys.argv[3] == "native":
        ctypes.PyDLL(None).sleep(600)  # in C, and Python's lock is not given back
    time.sleep(600)
in_user_code()
"""


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def write(records: Path, rank: int, **facts: object) -> None:
    heartbeat = {"rank": rank, "pid": os.getpid(), "beat": 1, "moves": 1} | facts
    (records / f"rank-{rank}.heartbeat.json").write_text(json.dumps(heartbeat))


def test_a_rank_without_a_heartbeat_or_with_half_of_one_is_left_out(tmp_path: Path) -> None:
    heartbeats = HeartbeatReader(tmp_path, range(3))
    assert heartbeats.read() == ()
    write(tmp_path, 1, place="train.py:3")
    (tmp_path / "rank-2.heartbeat.json").write_text('{"rank": 2, "pi')
    (only,) = heartbeats.read()
    assert (only.rank, only.place, only.state) == (1, "train.py:3", "R")


def test_how_long_python_could_not_run(tmp_path: Path) -> None:
    clock = Clock()
    heartbeats = HeartbeatReader(tmp_path, [0], clock)
    for now_s, beat, silent_s in ((100, 1, 0), (107, 1, 7), (108, 2, 0), (109, 2, 1)):
        clock.now_s = now_s
        write(tmp_path, 0, beat=beat)
        assert [one.silent_s for one in heartbeats.read()] == [silent_s]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def state(records: Path, heartbeats: HeartbeatReader, wanted: str) -> str:
    deadline = time.monotonic() + GIVE_UP_S
    while (found := heartbeats.read()[0].state) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_states_of_processes(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    heartbeats = HeartbeatReader(tmp_path, [0])
    write(tmp_path, 0, pid=sleeper.pid)
    assert state(tmp_path, heartbeats, "S") == "S"
    sleeper.send_signal(signal.SIGSTOP)
    assert state(tmp_path, heartbeats, "T") == "T"
    sleeper.kill()
    assert state(tmp_path, heartbeats, "Z") == "Z"
    sleeper.wait()
    assert state(tmp_path, heartbeats, "X") == "X"
    assert heartbeats.read()[0].busy is None


def test_what_children_compute_counts_once_a_rank_stands_still(tmp_path: Path) -> None:
    burn = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    clock = Clock()
    heartbeats = HeartbeatReader(tmp_path, [0], clock)
    with subprocess.Popen(
        [sys.executable, "-c", burn], process_group=0, stdin=subprocess.DEVNULL
    ) as parent:
        try:
            write(tmp_path, 0, pid=parent.pid)
            burning = _descendant(parent.pid)
            os.kill(burning, signal.SIGSTOP)
            _await_state(burning, "T")
            heartbeats.read()
            for _ in range(2):  # it must be seen twice before it can be compared
                clock.now_s += 4.0
                quiet = heartbeats.read()[0].busy
            os.kill(burning, signal.SIGCONT)
            used_s = _cpu_s(burning)
            while _cpu_s(burning) < used_s + 0.5:
                time.sleep(0.01)
            clock.now_s += 1.0
            busy = heartbeats.read()[0].busy
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    assert quiet is not None
    assert quiet < 0.4
    assert busy is not None
    assert busy >= 0.5


def _descendant(pid: int) -> int:
    import psutil

    deadline = time.monotonic() + GIVE_UP_S
    while not (found := psutil.Process(pid).children(recursive=True)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(found[0].pid)


def _await_state(pid: int, wanted: str) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while (stat := heartbeats.read_process(pid)) is None or stat.state != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _cpu_s(pid: int) -> float:
    stat = heartbeats.read_process(pid)
    assert stat is not None
    return stat.cpu_s


# ---- examinations


class Rank:
    """A process with a heartbeat, as a rank's."""

    def __init__(self, records: Path, rank: int, how: str) -> None:
        (records / "train.py").write_text(_RANK)
        self.process = subprocess.Popen(
            [sys.executable, str(records / "train.py"), str(records), str(rank), how],
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"here\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_every_rank_shows_what_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def examined(rank: int, *, answer_s: float, signal_s: float) -> dict[tuple[int, str], str]:
        """Wait for what must come, however late, and not for what cannot."""
        monkeypatch.setattr(stack_dump, "_ANSWER_WITHIN_S", answer_s)
        monkeypatch.setattr(stack_dump, "_SIGNAL_WITHIN_S", signal_s)
        return asyncio.run(_examine(tmp_path, pids, (rank, 7)))

    ranks = [Rank(tmp_path, rank, how) for rank, how in enumerate(("asleep", "native", "stopped"))]
    try:
        ranks[2].process.send_signal(signal.SIGSTOP)
        pids = {rank: one.process.pid for rank, one in enumerate(ranks)}
        _await_state(pids[2], "T")
        found = {
            **examined(0, answer_s=GIVE_UP_S, signal_s=0.0),
            **examined(1, answer_s=0.5, signal_s=GIVE_UP_S),
            **examined(2, answer_s=0.5, signal_s=0.1),
        }
    finally:
        for one in ranks:
            one.end()
    asleep, native, stopped = (found[rank, "stacks.txt"] for rank in range(3))
    assert "thread MainThread, innermost call last:" in asleep
    assert "time.sleep(600)" in asleep
    assert "most recent call first" in native  # by the fault handler, without Python's lock
    assert 'train.py", line 10 in in_user_code' in native
    assert " T\n" in stopped  # the state of its process
    assert "train.py" not in stopped
    assert {rank for rank, _ in found} == {0, 1, 2}


class Examined(RankProcess):
    """A process as if a node agent had started it as a rank."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self._pid = pid

    @property
    def pid(self) -> int:
        return self._pid

    def send_signal(self, number: int) -> None:
        os.kill(self._pid, number)


async def _examine(
    records: Path, pids: dict[int, int], ranks: tuple[int, ...]
) -> dict[tuple[int, str], str]:
    running = [Examined(rank, pids[rank]) for rank in ranks if rank in pids]
    shown: list[protocol.Output] = [*await stack_dump.dump_stacks(records, running)]
    return {(one.rank, one.file): one.text for one in shown}


def test_a_process_that_would_die_of_the_signal_does_not_get_it(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_dump, "_ANSWER_WITHIN_S", 0.1)
    found = asyncio.run(_examine(tmp_path, {0: sleeper.pid}, (0,)))
    assert f"process {sleeper.pid}\n" in found[0, "stacks.txt"]
    assert "call first" not in found[0, "stacks.txt"]
    assert sleeper.poll() is None
