"""Trace in separate processes, so that the planner needs no torch, or read from the cache.

::

    with Tracer(cache=folder, say=print) as tracer:
        for found in tracer.records(requests):
            ...  # a TraceRecord, or TraceRefused with the reason
"""

import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

import msgspec

from torchmuster.launch.fingerprint import LEAST_TORCH, torch_too_old, torch_version
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.tracing.cache import TraceCache, as_asked, with_log
from torchmuster.redaction import redact_text
from torchmuster.units import format_seconds

PROGRAM = "torchmuster.plan.probes.trace"
_SAY_EVERY_S = 10.0
_LINES_SHOWN = 15
_NOISE = re.compile(r"(VERBOSE|INFO|STAGE|USDT):\d")  # log lines of torch's profiler


@dataclass(frozen=True, kw_only=True)
class TraceRefused:
    """Why there is no record: the model cannot be traced or cannot be built."""

    what: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    record: TraceRecord | None = None
    refused: TraceRefused | None = None


Found: TypeAlias = TraceRecord | TraceRefused


def progress_text(done: int, left: int, took_s: float) -> str:
    """Return how far tracing is; the plan may ask for more traces after these."""
    if not done:
        return f"tracing: 0 of {left} done after {took_s:.0f} s; the first takes longest"
    more_s = took_s / done * left
    return (
        f"tracing: {done} of {done + left} done after {took_s:.0f} s; the rest takes about "
        f"{format_seconds(more_s)}"
    )


class Tracer:
    """Answer requests for traces. Its processes start on demand and stop with it."""

    def __init__(
        self,
        *,
        cache: Path | None,
        workers: int = 2,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Prepare; no process is started yet.

        ``cache`` keeps records and logs between plans; without it, logs are deleted with the
        tracer. ``say`` receives the progress, at least every ten seconds.
        """
        self._cache = None if cache is None else TraceCache(cache)
        self._made: dict[TraceRequest, TraceRecord] = {}  # with their logs
        self._begun = self._said = time.monotonic()
        self._own_logs: tempfile.TemporaryDirectory[str] | None = None
        self._workers = workers
        self._say = say
        self._idle: dict[str, list[_Worker]] = {}  # by the folder of imports
        self._lock = threading.Lock()

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *error: object) -> None:
        for workers in self._idle.values():
            for one in workers:
                one.end()
        self._idle.clear()
        if self._own_logs is not None:
            self._own_logs.cleanup()
        if self._cache is not None and self._made:
            with suppress(OSError):  # another plan may be deleting the same files
                self._cache.forget_oldest()

    def records(self, requests: Sequence[TraceRequest]) -> list[Found]:
        """Return the record of each request, in order.

        All are traced with logs: it is little extra work, and the chosen candidates need them.
        """
        found = {one: self._known(one) for one in requests}
        missing = dict.fromkeys(with_log(one) for one, known in found.items() if known is None)
        traced = self._trace(list(missing)) if missing else {}
        self._made |= {key: one for key, one in traced.items() if isinstance(one, TraceRecord)}
        return [found[one] or _as_asked(one, traced[with_log(one)]) for one in requests]

    def _known(self, request: TraceRequest) -> TraceRecord | None:
        made = self._made.get(with_log(request))
        if made is not None:
            return as_asked(request, made)
        return None if self._cache is None else self._cache.get(request)

    def _trace(self, requests: list[TraceRequest]) -> dict[TraceRequest, Found]:
        waiting = deque(requests)
        done: queue.Queue[tuple[TraceRequest, Found]] = queue.Queue()
        stopped = threading.Event()
        threads = [
            threading.Thread(target=self._answer_all, args=(waiting, done, stopped))
            for _ in range(min(self._workers, len(requests)))
        ]
        for thread in threads:
            thread.start()
        try:
            return self._collected(len(requests), done)
        finally:
            stopped.set()
            waiting.clear()
            for thread in threads:
                thread.join()

    def _collected(
        self, wanted: int, done: "queue.Queue[tuple[TraceRequest, Found]]"
    ) -> dict[TraceRequest, Found]:
        found: dict[TraceRequest, Found] = {}
        while len(found) < wanted:
            left_s = self._said + _SAY_EVERY_S - time.monotonic()
            try:
                request, answer = done.get(timeout=max(left_s, 0.0))
            except queue.Empty:
                self._said = time.monotonic()
                took_s = self._said - self._begun
                self._say(progress_text(len(self._made) + len(found), wanted - len(found), took_s))
                continue
            if self._cache is not None and isinstance(answer, TraceRecord):
                answer = self._cache.put(answer)
            found[request] = answer
        return found

    def _answer_all(
        self,
        waiting: "deque[TraceRequest]",
        done: "queue.Queue[tuple[TraceRequest, Found]]",
        stopped: threading.Event,
    ) -> None:
        while not stopped.is_set():
            try:
                request = waiting.popleft()
            except IndexError:
                return
            done.put((request, self._answer(request)))

    def _answer(self, request: TraceRequest) -> Found:
        folder = request.work.folder
        with self._lock:
            version = torch_version()
            if version is not None and torch_too_old(version):
                return _too_old(version)
            idle = self._idle.setdefault(folder, [])
            try:
                worker = idle.pop() if idle else _Worker(folder, self._log_folder())
            except OSError as error:
                return TraceRefused(
                    what=f"cannot start a tracing process in {folder!r}", why=str(error)
                )
        answer = worker.ask(request)
        with self._lock:
            if isinstance(answer, str):
                return _died(answer)
            self._idle[folder].append(worker)
        found = answer.record or answer.refused
        assert found is not None, "an answer is a record or a refusal"
        return found

    def _log_folder(self) -> Path:
        if self._cache is not None:
            return self._cache.folder
        if self._own_logs is None:
            self._own_logs = tempfile.TemporaryDirectory(prefix="torchmuster-plan-")
        return Path(self._own_logs.name)


def _as_asked(request: TraceRequest, found: Found) -> Found:
    return as_asked(request, found) if isinstance(found, TraceRecord) else found


class _Worker:
    """A process that traces one request at a time."""

    def __init__(self, folder: str, logs: Path) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        command = [sys.executable, "-m", PROGRAM, str(logs.resolve())]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=folder,
            )
        except OSError:
            self._errors.close()
            raise

    def ask(self, request: TraceRequest) -> "_Answer | str":
        """Return the answer, or the last lines of its output if the process exited instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=_Answer)
        return self._last_words()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self.end()
        lines = [line for line in lines if not _NOISE.match(line)]
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return "\n".join([f"it exited with {ended}", *lines[-_LINES_SHOWN:]])

    def kill(self) -> None:
        """Kill the process; a waiting caller gets an error."""
        self._process.kill()

    def end(self) -> None:
        """Stop the process, whatever it is doing."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def _too_old(version: str) -> TraceRefused:
    return TraceRefused(
        what=f"torch {version} is older than {LEAST_TORCH}",
        why="torchmuster uses parts of torch that older versions do not have",
        fix=f"python -m pip install 'torch>={LEAST_TORCH}'",
    )


def _died(last_words: str) -> TraceRefused:
    return TraceRefused(
        what="the process that traces this model exited before it had an answer",
        why=redact_text(last_words),
        fix="check that this host has enough memory to build the model; signal 9 is usually the "
        "kernel's out-of-memory killer",
    )
