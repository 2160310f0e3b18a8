"""Follow a job from the queue to its end: its states and the lines of its log."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torchmuster.launch.schedulers.slurm import jobs

_READ_AT_ONCE = 2**20
# Slurm's clients have their own timeouts, so the thread is not joined for longer than this.
_LEAVE_S = 1.0

Poll = Callable[[str], jobs.JobState]


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A line of the job's log, without the newline."""

    text: str


@dataclass(frozen=True, kw_only=True)
class PollRhythm:
    """Polling intervals in seconds."""

    look_s: float = 0.25  # read the log
    poll_s: float = 3.0  # query Slurm's controller, which all users share
    say_s: float = 8.0  # report why there is no output


USUAL = PollRhythm()


def follow_job(
    job: str, *, rhythm: PollRhythm = USUAL, poll: Poll = jobs.poll_job
) -> Iterator[jobs.JobState | LogLine]:
    """Yield each change of the job's state and each line of its log, until the job has ended.

    While there is no output (the job is pending, or has written nothing yet), the state is yielded again
    every few seconds. Stopping early, even with Ctrl-C, does not affect the job.
    """
    state = jobs.JobState(job=job, kind="unknown", words=f"querying Slurm for job {job}")
    tail = _Tail()
    said = time.monotonic()
    wrote = False  # since the state last changed
    with _polling(job, poll, rhythm.poll_s) as news:
        while True:
            new = _next(news, rhythm.look_s)
            if new is not None and new.kind == "unknown":
                new = replace(new, log=state.log)
            if new is not None and _differ(state, new):
                yield new
                said, wrote = time.monotonic(), False
            state = new or state
            # After the end, read again: on a shared disk the last lines appear late.
            for _ in range(2 if state.final else 1):
                for text in tail.lines(state.log):
                    yield LogLine(text=text)
                    said, wrote = time.monotonic(), True
                if state.final:
                    time.sleep(rhythm.look_s)
            if state.final:
                if text := tail.unfinished():
                    yield LogLine(text=text)
                return
            waits = state.kind != "running" or not wrote
            if waits and time.monotonic() - said >= rhythm.say_s:
                yield state
                said = time.monotonic()


def left_running(job: str) -> str:
    """Return the message for a user who stops following before the job ends (Ctrl-C)."""
    return f"job {job} keeps running; to stop it: scancel {job}"


def _differ(old: jobs.JobState, new: jobs.JobState) -> bool:
    def shown(state: jobs.JobState) -> tuple[object, ...]:
        return state.kind, state.reason, state.nodes, state.restarts

    return shown(old) != shown(new)


def _next(
    news: "queue.SimpleQueue[jobs.JobState | BaseException]", wait_s: float
) -> jobs.JobState | None:
    try:
        new = news.get(timeout=wait_s)
    except queue.Empty:
        return None
    if isinstance(new, BaseException):
        raise new
    return new


@contextmanager
def _polling(
    job: str, poll: Poll, every_s: float
) -> Iterator["queue.SimpleQueue[jobs.JobState | BaseException]"]:
    """Poll Slurm in a thread, so that a slow controller does not delay the log."""
    news: queue.SimpleQueue[jobs.JobState | BaseException] = queue.SimpleQueue()
    over = threading.Event()

    def ask_again_and_again() -> None:
        while not over.is_set():
            try:
                news.put(poll(job))
            except BaseException as error:  # raised in the thread that reads the queue
                news.put(error)
                return
            over.wait(every_s)

    thread = threading.Thread(target=ask_again_and_again, name=f"slurm-job-{job}", daemon=True)
    thread.start()
    try:
        yield news
    finally:
        over.set()
        thread.join(_LEAVE_S)


class _Tail:
    """Read the new part of a file; reopen it each time, as network disks require."""

    def __init__(self) -> None:
        self._offset = 0
        self._rest = b""

    def lines(self, path: Path | None) -> Iterator[str]:
        """Yield the whole lines written since the last call."""
        while data := self._new_bytes(path):
            *whole, self._rest = (self._rest + data).split(b"\n")
            for line in whole:
                yield _follow_text(line)

    def unfinished(self) -> str:
        """Return the last line if it has no newline."""
        rest, self._rest = self._rest, b""
        return _follow_text(rest)

    def _new_bytes(self, path: Path | None) -> bytes:
        if path is None:
            return b""
        try:
            with path.open("rb") as stream:
                size = stream.seek(0, 2)
                if size < self._offset:  # it was truncated
                    self._offset, self._rest = 0, b""
                stream.seek(self._offset)
                data = stream.read(_READ_AT_ONCE)
        except OSError:  # does not exist yet, or is not on this host
            return b""
        self._offset += len(data)
        return data


def _follow_text(line: bytes) -> str:
    return line.rstrip(b"\r").decode(errors="replace")
