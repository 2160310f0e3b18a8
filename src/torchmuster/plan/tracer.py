"""Trace in a separate process, so that the planner itself needs no torch.

::

    with Tracer(say=print) as tracer:
        record = tracer.trace(request)  # or Impossible, with the reason
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

from torchmuster.errors import Impossible, MusterError
from torchmuster.launch.fingerprint import LEAST_TORCH, torch_too_old, torch_version
from torchmuster.launch.garbage_collection import freeze_objects
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.redaction import redact_text

SAY_EVERY_S = 10.0
ENDS_WITHIN_S = 2.0  # after the end of its requests
LINES_SHOWN = 15
ERRORS_FILE = "stderr"


class Tracer:
    """Traces requests in one process, which starts with the first request and ends with the ``with``.

    A request is traced once, even if it comes again. ``say`` gets a progress text every ten seconds.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._say = say
        self._process: _TracingProcess | None = None
        self.trace = cache(self._trace)

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.end()

    def _trace(self, request: TraceRequest) -> TraceRecord:
        version = torch_version()
        if version is not None and torch_too_old(version):
            raise Impossible(
                f"torch {version} is older than {LEAST_TORCH}",
                why="torchmuster uses parts of torch that older versions do not have",
                fix=f"python -m pip install 'torch>={LEAST_TORCH}'",
            )
        if self._process is None:
            self._process = _TracingProcess()
        try:
            answer = self._process.answer(request, self._say)
        except (EOFError, ConnectionError) as error:
            why = self._process.end()
            self._process = None
            raise Impossible(
                "the process that traces this model exited before it had an answer",
                why=redact_text(why),
                fix="check that this host has enough memory to build the model; signal 9 is "
                "usually the kernel's out-of-memory killer",
            ) from error
        if isinstance(answer, MusterError):
            raise answer
        return answer


class _TracingProcess:
    """A process that traces one request at a time. It ends when this one does, also by a kill."""

    def __init__(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._connection, its_connection = spawning.Pipe()
        self._scratch = tempfile.TemporaryDirectory(prefix="muster-plan-")
        self._errors = Path(self._scratch.name) / ERRORS_FILE
        self._errors.touch()
        self._process = spawning.Process(
            target=answer_requests, args=(its_connection, str(self._errors)), daemon=True
        )
        self._process.start()
        its_connection.close()  # so that an exit of the process ends a read here

    def answer(
        self, request: TraceRequest, say: Callable[[str], None]
    ) -> TraceRecord | MusterError:
        """Return the answer; EOFError or ConnectionError if the process exited instead."""
        begun_s = time.monotonic()
        self._connection.send(request)
        while not self._connection.poll(SAY_EVERY_S):
            say(f"tracing: {time.monotonic() - begun_s:.0f} s; the first trace takes longest")
        answer: TraceRecord | MusterError = self._connection.recv()
        return answer

    def end(self) -> str:
        """Stop the process; return how it ended, with its last lines."""
        self._connection.close()
        self._process.join(ENDS_WITHIN_S)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        lines = self._errors.read_text(errors="replace").splitlines()
        self._scratch.cleanup()
        ended = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return "\n".join([f"it exited with {ended}", *lines[-LINES_SHOWN:]])


def answer_requests(connection: Connection, errors: str) -> None:
    """Trace requests until the other end closes; runs in the process of its own.

    Answers have a pipe to themselves: what a model's code, a C library or a subprocess writes to
    descriptor 1 or 2 goes to the file ``errors``, which is read if the process exits.
    """
    with Path(errors).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from torchmuster.plan.probes.trace import trace_or_error

    freeze_objects()

    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(trace_or_error(request))
