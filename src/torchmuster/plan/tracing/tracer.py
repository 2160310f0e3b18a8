"""Trace in a separate process, so that the planner needs no torch, or read from the cache.

::

    with Tracer(cache=folder, say=print) as tracer:
        for traced in tracer.records(requests):
            ...  # a TraceRecord, or TraceRefused with the reason
"""

import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from torchmuster.launch.fingerprint import LEAST_TORCH, torch_too_old, torch_version
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.tracing.cache import TraceCache
from torchmuster.redaction import redact_text

PROGRAM = "torchmuster.plan.probes.trace"
_SAY_EVERY_S = 10.0
_ENDS_WITHIN_S = 2.0  # after the end of its requests
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


Traced: TypeAlias = TraceRecord | TraceRefused


class Tracer:
    """Answer requests for traces. Its process starts on demand and stops with it.

    ``cache`` is the folder that keeps records between plans; ``say`` receives the progress.
    """

    def __init__(
        self, *, cache: Path | None, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._cache = None if cache is None else TraceCache(cache)
        self._say = say
        self._worker: _Worker | None = None

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *error: object) -> None:
        if self._worker is not None:
            self._worker.end()
            if self._cache is not None:
                self._cache.forget_oldest()

    def records(self, requests: Sequence[TraceRequest]) -> list[Traced]:
        """Return the record of each request, in order."""
        traced: dict[TraceRequest, Traced] = {}
        missing = []
        for request in dict.fromkeys(requests):
            record = None if self._cache is None else self._cache.get(request)
            if record is None:
                missing.append(request)
            else:
                traced[request] = record
        for number, request in enumerate(missing, start=1):
            answer = self._trace(request, f"tracing {number} of {len(missing)}")
            traced[request] = answer
            if self._cache is not None and isinstance(answer, TraceRecord):
                self._cache.put(answer)
        return [traced[request] for request in requests]

    def _trace(self, request: TraceRequest, doing: str) -> Traced:
        version = torch_version()
        if version is not None and torch_too_old(version):
            return TraceRefused(
                what=f"torch {version} is older than {LEAST_TORCH}",
                why="torchmuster uses parts of torch that older versions do not have",
                fix=f"python -m pip install 'torch>={LEAST_TORCH}'",
            )
        if self._worker is None:
            self._worker = _Worker(request.work.folder)  # all requests of a plan have one folder
        line = self._worker.answer(request, lambda text: self._say(f"{doing}: {text}"))
        if not line.endswith(b"\n"):
            last_lines = self._worker.end()
            self._worker = None
            return TraceRefused(
                what="the process that traces this model exited before it had an answer",
                why=redact_text(last_lines),
                fix="check that this host has enough memory to build the model; signal 9 is "
                "usually the kernel's out-of-memory killer",
            )
        answer = msgspec.json.decode(line, type=_Answer)
        return answer.record or answer.refused or TraceRefused(what="there was no answer")


class _Worker:
    """A process that traces one request at a time."""

    def __init__(self, folder: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=folder,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def answer(self, request: TraceRequest, say: Callable[[str], None]) -> bytes:
        """Return the answer's line; without a line's end if the process exited instead."""
        begun_s = time.monotonic()
        line = b""
        with suppress(BrokenPipeError):
            self._requests.write(msgspec.json.encode(request) + b"\n")
            while not line.endswith(b"\n"):
                ready, _, _ = select.select([self._answers], [], [], _SAY_EVERY_S)
                if not ready:
                    say(f"{time.monotonic() - begun_s:.0f} s; the first trace takes longest")
                    continue
                part = self._answers.read(2**20)
                if not part:
                    break
                line += part
        return line

    def end(self) -> str:
        """Stop the process; return how it ended, with its last lines, if it ended by itself."""
        with suppress(BrokenPipeError):
            self._requests.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_WITHIN_S)
        code = self._process.poll()
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        self._errors.close()
        lines = [line for line in text.strip().splitlines() if not _NOISE.match(line)]
        ended = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return "\n".join([f"it exited with {ended}", *lines[-_LINES_SHOWN:]])
