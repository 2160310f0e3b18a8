"""Starting ``muster run`` on a host of a lab, and reading what it says while it says it."""

import re
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from hosts.host import Host, HostProcess
from hosts.lab import Lab
from hosts.namespaces import await_true
from muster_command import muster_argv
from patience import GIVE_UP_S
from torchmuster.launch.node.process_cleanup import TOKEN_VARIABLE

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_torchrun.py"
#: A script that prints three lines on each rank.
SMOKE = (str(_EXAMPLE),)
#: A script that does the same once it is told to, by a file beside it: until then it runs.
SMOKE_WHEN_TOLD = f"""
import pathlib, runpy, time
while not pathlib.Path("go").exists():
    time.sleep(0.05)
runpy.run_path({str(_EXAMPLE)!r}, run_name="__main__")
"""
#: For runs that are not to lose anybody, however long a busy machine lets a process wait.
PATIENT = ("--set", "launch.lost_after=100s")


def muster_run(host: Host, words: Sequence[str], cwd: Path, **env: str) -> HostProcess:
    """Start ``muster run …`` on a host, in a folder; its output is for a `Transcript`."""
    return host.popen(
        muster_argv(["run", *words]),
        cwd=cwd,
        env={"NO_COLOR": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@dataclass(frozen=True)
class Line:
    """One line that a command wrote, and when: seconds since the transcript began."""

    at_s: float
    stream: Literal["out", "err"]
    text: str


class Transcript:
    """Everything that a command writes, line by line, with the time; read by two threads.

    The threads end when the command and all that hold its output are gone, at the latest with the lab.
    """

    def __init__(self, process: HostProcess) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self._began = time.monotonic()
        self._lines: list[Line] = []
        self._open = 2
        self._news = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, stream), daemon=True)
            for pipe, stream in ((process.stdout, "out"), (process.stderr, "err"))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def lines(self) -> list[Line]:
        """All lines so far, in the order in which they came."""
        with self._news:
            return list(self._lines)

    def text(self, stream: Literal["out", "err"] | None = None) -> str:
        """Return what was written so far, to one stream or to both."""
        return "".join(f"{one.text}\n" for one in self.lines if stream in (None, one.stream))

    def wait_for(self, text: str) -> Line:
        """Wait for a line that contains this text, and return it."""
        deadline = time.monotonic() + GIVE_UP_S
        with self._news:
            while True:
                for line in self._lines:
                    if text in line.text:
                        return line
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._open == 0:
                    said = "\n".join(f"{one.at_s:6.1f} {one.text}" for one in self._lines)
                    raise AssertionError(f"not said within {GIVE_UP_S:g} s: {text!r}\n{said}")
                self._news.wait(min(left_s, 0.5))

    def end(self) -> int:
        """Wait until the command is over and all it said is read; return its exit code."""
        try:
            code = self.process.wait(GIVE_UP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {GIVE_UP_S:g} s:\n{self.text()}") from None
        for reader in self._readers:
            reader.join(GIVE_UP_S)
        return code

    def _read(self, pipe: IO[str], stream: Literal["out", "err"]) -> None:
        # The lab closes the pipes when it ends.
        with suppress(ValueError, OSError):
            for raw in pipe:
                with self._news:
                    at_s = time.monotonic() - self._began
                    self._lines.append(Line(at_s=at_s, stream=stream, text=raw.rstrip("\n")))
                    self._news.notify_all()
        with self._news:
            self._open -= 1
            self._news.notify_all()


def leftovers(lab: Lab) -> dict[str, list[str]]:
    """Return the command lines of all processes of any run that live, by host; {} is what we want."""
    found = {}
    for host in lab.hosts:
        commands = [_command(pid) for pid in host.processes_with_environment(TOKEN_VARIABLE)]
        if commands := [one for one in commands if one]:
            found[host.name] = commands
    return found


def strays(lab: Lab) -> dict[str, list[str]]:
    """Return the command lines of everything of ours that lives on any host, by host."""
    found = {}
    for host in lab.hosts:
        commands = [_command(pid) for pid in host.pids()]
        if commands := [one for one in commands if "torchmuster" in one]:
            found[host.name] = commands
    return found


def rank_lines(transcript: Transcript) -> list[str]:
    """Return the lines that ranks wrote, in the order in which they came."""
    return [one.text for one in transcript.lines if re.match(r"\[rank \d+\]", one.text)]


def _command(pid: int) -> str:
    with suppress(OSError):
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
    return ""


def code_of(transcript: Transcript) -> str:
    """Return the join code that a command has printed."""

    def codes() -> list[str]:
        return re.findall(r"^  (\S{60,})$", transcript.text(), re.MULTILINE)

    await_true("the code", lambda: bool(codes()))
    return codes()[0]
