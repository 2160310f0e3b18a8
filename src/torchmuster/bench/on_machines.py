"""A program that measures, run on ranks of several machines over ssh: asked and answered in our types.

``probing.py`` does it on this machine, with files. Machines need not share files, so here the request is a word of the
command, and what each rank answers is a line that it prints.
"""

import contextlib
import dataclasses
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from torchmuster.errors import ExitCode, MusterError
from torchmuster.finding import Finding
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.console import TerminalVoice
from torchmuster.launch.launcher.launch_job import launch
from torchmuster.launch.transports.ssh import SshTransport
from torchmuster.runfolder import RunFolder, create

MARK = "torchmuster-answer "
TO_OUTPUT = "-"  # in place of a folder for answers
T = TypeVar("T")


class _Listening(TerminalVoice):
    """A voice that keeps what the ranks write and what is found, and says the launcher's own words."""

    def __init__(self, run: RunFolder, say: Callable[[str], None]) -> None:
        super().__init__(run)
        self._say = say
        self.texts: dict[int, str] = defaultdict(str)
        self.findings: tuple[Finding, ...] = ()

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Show nothing of what the ranks write."""
        yield

    def world(self, size: int) -> None:
        """Need nothing."""

    def say(self, text: str) -> None:
        """Say who has joined, and what is waited for."""
        self._say(text)

    def output(self, rank: int, text: str) -> None:
        """Keep it: an answer may come in pieces."""
        self.texts[rank] += text

    def show(self, findings: Sequence[Finding]) -> None:
        """Keep what was found."""
        self.findings += tuple(findings)

    def finish(self) -> None:
        """Have nothing left to show."""


def run_probe_on_machines(
    spec: JobSpec,
    request: object,
    answer: type[T],
    *,
    python: str | None = None,
    doing: str,
    say: Callable[[str], None] = lambda _: None,
) -> list[T]:
    """Run a module of ours on the machines of a job, and return what its ranks answer, by rank.

    The job's command is the module alone. Its ``main`` is given the request as JSON, and ``-`` in place of a folder:
    then it answers with :func:`print_answer`.
    """
    (program,) = spec.command
    words = (program, msgspec.json.encode(request).decode(), TO_OUTPUT)
    spec = dataclasses.replace(spec, command=words, module=True)
    transport = SshTransport(
        spec.hosts, python or sys.executable, lost_after_s=spec.limits.lost_after_s
    )
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as place:
        run = create(Path(place), spec.name)
        voice = _Listening(run, say)
        code = launch(spec, transport, run, lambda _: voice)
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code != ExitCode.GOOD:
        raise _failed(doing, voice.findings)
    found = answers_in(voice.texts, answer)
    if not found or len(found) != len(voice.texts):
        raise MusterError(
            f"{doing} failed",
            why=f"{len(found)} of {len(voice.texts)} ranks told what they saw",
            fix="try again; nothing was kept of it",
        )
    return found


def print_answer(text: str) -> None:
    """Answer as a rank whose files nobody here can read."""
    sys.stdout.write(f"{MARK}{text}\n")
    sys.stdout.flush()


def answers_in(texts: dict[int, str], answer: type[T]) -> list[T]:
    """Return what ranks answered, by rank, among all that they wrote; without those that did not."""
    found = []
    for rank in sorted(texts):
        lines = [line for line in texts[rank].splitlines() if line.startswith(MARK)]
        if lines:
            found.append(msgspec.json.decode(lines[-1].removeprefix(MARK), type=answer))
    return found


def _failed(doing: str, findings: Sequence[Finding]) -> MusterError:
    if not findings:
        return MusterError(f"{doing} failed", why="nothing says why", fix="muster check --hosts …")
    last = findings[-1]
    parts = (last.what, last.why, *last.evidence.splitlines())
    seen = "\n".join(part for part in parts if part and not part.startswith("log: "))
    return MusterError(f"{doing} failed", why=seen, fix=last.fix)
