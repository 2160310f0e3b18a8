"""A real ``muster run`` in a process of its own: listened to, signalled, and seen to leave nothing."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from muster_command import Result, muster_argv
from patience import GIVE_UP_S
from torchmuster.runfolder import RunFolder, list_runs

# Inherited by everything that a run starts, also by what no longer has a parent.
MARK = "TEST_LAUNCHED_MARK"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PET_")

# Ranks that say when they are there, and then wait for their end.
WAITING = """\
import os, signal, sys, time
print("waiting", os.environ["RANK"], flush=True)
time.sleep(600)
"""


def living(mark: str) -> list[psutil.Process]:
    """Return the processes that have this mark in their environment and live."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.environ().get(MARK) == mark
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_until_nothing_lives(mark: str) -> None:
    """Wait until nothing with this mark is alive."""
    until_s = time.monotonic() + GIVE_UP_S
    while left := living(mark):
        assert time.monotonic() < until_s, f"still alive after {GIVE_UP_S:g} s: {left}"
        time.sleep(0.05)


class Launched:
    """A ``muster`` command that runs."""

    def __init__(
        self,
        folder: Path,
        words: tuple[str, ...],
        env: Mapping[str, str],
        before: tuple[str, ...] = (),
    ) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        self.folder = folder
        self.mark = os.urandom(8).hex()
        self.process = subprocess.Popen(
            [*before, *muster_argv(words)],
            cwd=folder,
            env={**inherited, **env, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A command typed at a terminal is the leader of its group.
            process_group=0,
        )
        self.lines: list[str] = []
        self._out: list[str] = []
        self._err: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        self._closed = 0  # of the two streams
        self._readers = [
            threading.Thread(target=self._read, args=(stream, kept))
            for stream, kept in (
                (self.process.stdout, self._out),
                (self.process.stderr, self._err),
            )
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: "subprocess.IO[str]", kept: list[str]) -> None:  # type: ignore[name-defined]
        for line in stream:
            kept.append(line)
            self._news.put(line.rstrip("\n"))
        self._news.put(None)

    def wait_for(self, *texts: str, within_s: float = GIVE_UP_S) -> None:
        """Wait until a line with each of these texts was shown."""
        deadline = time.monotonic() + within_s
        missing = [text for text in texts if not any(text in line for line in self.lines)]
        while missing:
            try:
                line = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{missing} not shown within {within_s} s:\n{self}") from None
            if line is not None:
                self.lines.append(line)
                missing = [text for text in missing if text not in line]
            elif self._is_over():
                raise AssertionError(f"it ended before it showed {missing}:\n{self}")

    def wait_for_more(self, *texts: str, within_s: float = GIVE_UP_S) -> None:
        """Wait until a line with all of these texts is shown that was not read before; it is the last."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                line = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{texts} not shown within {within_s} s:\n{self}") from None
            if line is not None:
                self.lines.append(line)
                if all(text in line for text in texts):
                    return
            elif self._is_over():
                raise AssertionError(f"it ended before it showed {texts}:\n{self}")

    def _is_over(self) -> bool:
        """Take note of a stream's end; the last lines of the other one may still come."""
        self._closed += 1
        return self._closed == len(self._readers)

    def end(self, within_s: float = GIVE_UP_S) -> Result:
        """Wait for the end of the command."""
        code = self.process.wait(within_s)
        for reader in self._readers:
            reader.join(10)
        return Result(code, "".join(self._out), "".join(self._err))

    def send(self, number: signal.Signals) -> float:
        """Send a signal to the command; return when."""
        self.process.send_signal(number)
        return time.monotonic()

    @property
    def run(self) -> RunFolder:
        """The run's folder."""
        (run,) = list_runs(self.folder / "runs")
        return run

    def alive(self) -> list[psutil.Process]:
        """Return everything that this command started and that lives, itself included."""
        return living(self.mark)

    def wait_until_nothing_lives(self) -> None:
        """Wait until nothing of it is alive."""
        wait_until_nothing_lives(self.mark)

    def __str__(self) -> str:
        return f"--- standard output\n{''.join(self._out)}--- standard error\n{''.join(self._err)}"

    def clean_up(self) -> None:
        """Kill what a failed test left."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(10)
        for reader in self._readers:
            reader.join(10)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def said_by(rank: int, shown: str, *, ranks: int = 2) -> list[str]:
    """Return what a rank said: what all say is shown once only where they say it at the same moment."""
    marks = (f"[all {ranks} ranks] ", f"[rank {rank}] ")
    return [
        line.removeprefix(mark)
        for line in shown.splitlines()
        for mark in marks
        if line.startswith(mark)
    ]


def line_with(shown: str, *facts: str) -> str:
    """Return the one line that contains all of these facts; ranks may have printed it more than once."""
    (line,) = {line for line in shown.splitlines() if all(fact in line for fact in facts)}
    return line


@contextlib.contextmanager
def launched(
    folder: Path,
    *words: str,
    env: Mapping[str, str] | None = None,
    before: tuple[str, ...] = (),
) -> Iterator[Launched]:
    """Start ``muster`` with these words, after those before; at the end nothing of it may be left."""
    command = Launched(folder, words, env or {}, before)
    try:
        yield command
    finally:
        command.clean_up()


def cpu(script: str, *flags: str, ranks: int = 2) -> tuple[str, ...]:
    """Return the words that run a script on the processor."""
    return ("run", "--device", "cpu", "--ranks", str(ranks), *flags, script)
