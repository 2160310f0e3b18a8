"""``muster top`` as its users call it."""

import os
import pty
import select
import socket
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from muster_command import Muster, muster_argv
from nvml_stub import scenarios
from nvml_stub.scenarios import FIRST_PID, Scenario
from patience import GIVE_UP_S
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.history import node_records
from torchmuster.runfolder import RunFolder, create_run_folder

Machine = Callable[[Scenario], Path]


def _run_with_ranks(folder: Path, count: int) -> RunFolder:
    run = create_run_folder(folder / "runs", "llm")
    heartbeats = tuple(
        Heartbeat(
            rank=rank, pid=FIRST_PID + rank, beat=1, moves=1, step=1200, data_share=0.1 * rank
        )
        for rank in range(count)
    )
    # Just told, however late they are looked at.
    told = node_records.NodeRanks(
        host=socket.gethostname(), attempt=0, at_unix_s=time.time() + GIVE_UP_S, ranks=heartbeats
    )
    path = node_records.node_record_path(run, told.host, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode(told))
    return run


def test_one_look_at_gpus_and_ranks(machine: Machine, muster: Muster, own_machine: Path) -> None:
    machine(scenarios.eight_a100())
    run = _run_with_ranks(own_machine, 4)
    result = muster("top", run.id, "--once", env={"COLUMNS": "80"})
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert "8 x A100-SXM4-80GB" in lines[0]
    gpu = next(line for line in lines if line.startswith("  2  "))
    assert "rank 2" in gpu
    assert lines[-1].split()[:3] == ["3", "3", "1,200"]
    assert "\x1b" not in result.out
    assert max(map(len, lines)) <= 80


def test_it_sorts(machine: Machine, muster: Muster, own_machine: Path) -> None:
    machine(scenarios.no_gpus())
    run = _run_with_ranks(own_machine, 3)
    result = muster("top", run.id, "--once", "--sort", "data")
    assert [line.split()[0] for line in result.out.splitlines()[-3:]] == ["2", "1", "0"]


def test_into_a_pipe_it_is_one_look(machine: Machine, muster: Muster) -> None:
    machine(scenarios.no_gpus())
    result = muster("top")
    assert result.code == 0
    assert "no GPU" in result.out
    assert "no active run" in result.out


def test_a_run_that_is_not_there(muster: Muster) -> None:
    result = muster("top", "nope", "--once")
    assert result.code != 0
    assert "there is no run 'nope'" in result.err


class Terminal:
    """``muster top`` on a terminal of its own."""

    def __init__(self, folder: Path, **env: str) -> None:
        leader, follower = pty.openpty()
        termios.tcsetwinsize(follower, (24, 80))
        self.shown = b""
        self._leader = leader
        self.process = subprocess.Popen(
            muster_argv(["top", "--interval", "0.2"]),
            cwd=folder,
            env={**os.environ, "TERM": "xterm-256color", **env},
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)

    def read_until(self, *wanted: bytes) -> None:
        while not all(one in self.shown for one in wanted):
            if not self._read_more():
                assert all(one in self.shown for one in wanted), self.shown
                return

    def _read_more(self) -> bool:
        """Read what comes next; say whether there is more to come."""
        ready, _, _ = select.select([self._leader], [], [], GIVE_UP_S)
        assert ready, self.shown
        try:
            self.shown += os.read(self._leader, 65536)
        except OSError:  # it has ended
            return False
        return True

    def press(self, keys: bytes) -> None:
        os.write(self._leader, keys)

    def end(self) -> int:
        try:
            while self._read_more():  # on a terminal that is full it could not end
                pass
            return self.process.wait(GIVE_UP_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            os.close(self._leader)


def test_on_a_terminal_it_is_live_until_q(machine: Machine, own_machine: Path) -> None:
    machine(scenarios.eight_a100())
    terminal = Terminal(own_machine)
    terminal.read_until(b"8 x A100-SXM4-80GB", b"quit")
    terminal.press(b"q")
    assert terminal.end() == 0


def test_without_textual_it_says_what_to_install(own_machine: Path) -> None:
    hidden = own_machine / "hidden"
    (hidden / "textual").mkdir(parents=True)
    (hidden / "textual" / "__init__.py").write_text("raise ImportError('not installed')\n")
    path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    terminal = Terminal(own_machine, PYTHONPATH=path)
    terminal.read_until(b"the package textual is not installed", b"torchmuster[watch]")
    assert terminal.end() != 0


def test_one_look_needs_no_textual(machine: Machine, muster: Muster, own_machine: Path) -> None:
    machine(scenarios.no_gpus())
    hidden = own_machine / "hidden"
    (hidden / "textual").mkdir(parents=True)
    (hidden / "textual" / "__init__.py").write_text("raise ImportError('not installed')\n")
    path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    assert muster("top", "--once", env={"PYTHONPATH": path}).code == 0
