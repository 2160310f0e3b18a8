"""Killing parts of a run that spans two hosts, and seeing what is left of it.

A `Run` knows every process that appeared on the hosts since before it was launched, whatever started
it: what counts as gone is that none of them is alive.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hosts.faults import HostKilled, LinkCut
from hosts.host import HostProcess
from hosts.lab import Lab
from hosts.launching import Transcript, muster_run
from hosts.namespaces import await_true
from patience import GIVE_UP_S

#: What all scripts of these tests begin with: every rank has two children that outlive it if they can.
_FAMILY = """
import atexit, os, signal, subprocess, sys, time
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
if "ignore-sigterm" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"SIGTERM ignored\\n"))
rank = int(os.environ["RANK"])
"""
SCRIPTS = {
    # Nothing of the script has run when the ranks are hit.
    "starting": f"{_FAMILY}time.sleep(1000)\n",
    "running": f"""{_FAMILY}
import torch, torch.distributed as dist
dist.init_process_group("gloo")
step = 0
while True:
    dist.all_reduce(torch.ones(1))
    step += 1
    if step % 10 == 1:
        print(f"step {{step}}", flush=True)
    time.sleep(0.02)
""",
    # Rank 0 has finished, and its agent waits for the others; they are on their way out.
    "ending": f"""{_FAMILY}
if rank > 0:
    atexit.register(time.sleep, 1000)
print("done", flush=True)
""",
}
#: What is to be waited for until a run is in a phase.
_REACHED = {"starting": "ranks started", "running": "step 11", "ending": "done"}


@dataclass
class Run:
    """A run on the hosts of a lab, launched from node1."""

    lab: Lab
    folder: Path
    process: HostProcess
    transcript: Transcript
    before: dict[str, set[int]]
    #: For faults that go on: what undoes them.
    undo: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def launch(
        cls, lab: Lab, folder: Path, script: str, *words: str, options: Sequence[str] = ()
    ) -> "Run":
        """Launch a script, one rank on each of the first two hosts unless ``options`` say otherwise."""
        (folder / "script.py").write_text(script)
        before = {host.name: set(host.pids()) for host in lab.hosts}
        command = ["--device", "cpu", "--ranks", "1", "--hosts", "node1,node2", *options]
        process = muster_run(lab.hosts[0], [*command, "script.py", *words], folder)
        return cls(lab, folder, process, Transcript(process), before)

    def wait_for_phase(self, phase: str) -> None:
        """Wait until the run has come so far; ``calling`` is before anybody has answered."""
        if phase == "calling":
            self.await_one("node2", is_node_agent)
            return
        self.transcript.wait_for(_REACHED[phase])
        if phase == "ending":
            self.wait_for_ranks(_REACHED[phase])  # one that has not begun is not gone
            await_true("rank 0 is gone", lambda: not self.find("node1", is_rank(0)))

    def wait_for_ranks(self, text: str, *, ranks: int = 2) -> None:
        """Wait until so many ranks have written this; their logs tell, however they are shown."""
        deadline_s = time.monotonic() + GIVE_UP_S
        while True:
            over = time.monotonic() > deadline_s or self.process.poll() is not None
            if sum(text in log.read_text() for log in self._logs()) >= ranks:
                return
            if over:
                raise AssertionError(f"not written by all: {text!r}\n{self.transcript.text()}")
            time.sleep(0.02)

    def _logs(self) -> list[Path]:
        return list(self.folder.glob("runs/*/logs/rank-*.log"))

    def find(self, host: str, matches: Callable[[int], bool]) -> list[int]:
        """Return the processes on a host that came since the launch and match."""
        there = self.lab.host(host)
        return [pid for pid in there.pids() if pid not in self.before[host] and matches(pid)]

    def await_one(self, host: str, matches: Callable[[int], bool]) -> int:
        """Wait until there is such a process, and return it."""
        found: list[int] = []

        def is_there() -> bool:
            found[:] = self.find(host, matches)
            return bool(found)

        await_true(f"{matches} on {host}", is_there)
        return found[0]

    def left(self) -> dict[str, list[str]]:
        """Return what is alive of the run, by host.

        An sshd that listens (also again, after a boot) is not the run's, nor is the session of one
        whose link was cut: it ends when the system's TCP gives up.
        """
        cut = bool(self.undo)
        found = {}
        for host in self.lab.hosts:
            new = (pid for pid in host.pids() if pid not in self.before[host.name])
            lines = [line for pid in new if (line := command_line(pid))]
            lines = [line for line in lines if not (cut and line.startswith("sshd"))]
            lines = [line for line in lines if "[listener]" not in line]
            if lines:
                found[host.name] = lines
        return found

    def wait_until_clean(self) -> None:
        """Wait until nothing of the run is left on any host."""
        until_s = time.monotonic() + GIVE_UP_S
        while left := self.left():
            if time.monotonic() > until_s:
                raise AssertionError(f"still alive: {left}\n{self.transcript.text()}")
            time.sleep(0.02)

    def end(self) -> int:
        """Undo what was done to the hosts, and return the command's exit code."""
        try:
            return self.transcript.end()
        finally:
            for undo in self.undo:
                undo()


def command_line(pid: int) -> str:
    """Return a process's command; "" if it has gone (a zombie has none either)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" ").decode().strip()
    return ""


def runs_module(module: str) -> Callable[[int], bool]:
    """Match processes of ``python -m module``, and not the ssh that has it started elsewhere."""
    pattern = re.compile(rf"\S*python\S* -m {re.escape(module)}(?: |$)")
    return lambda pid: bool(pattern.match(command_line(pid)))


is_node_agent = runs_module("torchmuster.launch.node")
is_supervisor = runs_module("torchmuster.launch.node.supervisor")


def is_store(pid: int) -> bool:
    """Match the process that serves the ranks' store."""
    return any(word.endswith("/launch/node/store.py") for word in command_line(pid).split())


def is_ssh_session(pid: int) -> bool:
    """Match sshd's processes for one session: the listener was there before."""
    return command_line(pid).startswith("sshd")


def is_rank(rank: int) -> Callable[[int], bool]:
    """Match the process of a rank: not its agent, nor what it started."""

    def matches(pid: int) -> bool:
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(bytes(1))
            words = command_line(pid).split()
            return f"RANK={rank}".encode() in variables and any(
                word.endswith("/launch/rank/start.py") for word in words
            )
        return False

    return matches


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Somebody, or something, that is killed: on which host, and what it does to the run."""

    victim: str
    host: str = "node2"

    def strike(self, run: Run) -> float:
        """Kill; return when that was."""
        if self.victim == "host":
            return _now_and_until_undone(run, HostKilled(host=self.host).apply)
        if self.victim == "link":
            return _now_and_until_undone(run, LinkCut(host=self.host).apply)
        if self.victim == "launcher":
            victims = [run.process.command_pid]
        else:
            matches = _MATCHES.get(self.victim) or is_rank(_number(self.victim))
            run.await_one(self.host, matches)
            victims = run.find(self.host, matches)
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return time.monotonic()


_MATCHES: dict[str, Callable[[int], bool]] = {
    "store": is_store,
    "node agent": is_node_agent,
    "supervisor": is_supervisor,
    "ssh session": is_ssh_session,
}


def _number(victim: str) -> int:
    return int(victim.removeprefix("rank "))


def _now_and_until_undone(run: Run, apply: Callable[[Lab], Callable[[], None]]) -> float:
    run.undo.append(apply(run.lab))
    return time.monotonic()
