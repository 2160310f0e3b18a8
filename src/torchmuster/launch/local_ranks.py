"""Run a torchmuster module on fresh ranks of this machine and collect what each rank wrote.

Each run uses new processes, so a failure (out of memory, a broken process group) cannot affect the
next run.
"""

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchmuster.errors import ExitCode
from torchmuster.finding import Finding
from torchmuster.launch.job import JobSpec, Limits
from torchmuster.launch.launcher.console import Console
from torchmuster.launch.launcher.launch import run_task
from torchmuster.launch.launcher.run import Run
from torchmuster.launch.transports.local import LocalTransport
from torchmuster.runfolder import create_run_folder, write_atomically

# If one rank fails the others cannot finish, and a hang gives no result.
_GRACE_S = 1.0
_HANGS_AFTER_S = 60.0
_SAY_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RankAnswers:
    """The outcome of the ranks: the text each wrote, by rank; and why they failed, if they did."""

    texts: dict[int, str]
    trouble: Finding | None


class _FindingsOnly(Console):
    """A console that keeps findings and prints nothing."""

    findings: tuple[Finding, ...] = ()

    def show(self, findings: Sequence[Finding]) -> None:
        """Keep the finding."""
        self.findings += tuple(findings)


def run_local_ranks(
    program: str,
    request: str,
    *,
    ranks: int,
    device: Literal["cpu", "gpu"],
    folder: str,
    name: str,
    typed: tuple[str, ...] = ("plan",),
    doing: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> RankAnswers:
    """Run a module on a number of ranks and wait until they exit.

    It gets two arguments: a file with the ``request``, and a folder in which each rank writes its
    answer as ``rank-N.json``. ``folder`` is the working folder, ``typed`` the user's command line
    after ``muster``. ``say`` is called every ten seconds with what the ranks are ``doing``.
    ``KeyboardInterrupt`` leaves no rank running.
    """
    with tempfile.TemporaryDirectory(prefix=f"muster-{typed[0]}-") as folder_of_ranks:
        place = Path(folder_of_ranks)
        request_path, answers = place / "request.json", place / "answers"
        answers.mkdir()
        write_atomically(request_path, request, durable=False)
        spec = JobSpec(
            name=name,
            command=(program, str(request_path), str(answers)),
            module=True,
            typed=typed,
            folder=folder,
            device=device,
            ranks=ranks,
            limits=Limits(grace_s=_GRACE_S, end_hangs_s=_HANGS_AFTER_S),
        )
        folder_of_run = create_run_folder(place, name)
        console = _FindingsOnly()
        transport = LocalTransport(socket.gethostname())
        with _with_progress(f"{doing or name} on {ranks} {'rank' if ranks == 1 else 'ranks'}", say):
            code = run_task(Run(spec, transport, console, folder_of_run), console)
        if code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if code in (ExitCode.TERMINATED, ExitCode.KILLED):
            raise SystemExit(code)
        texts = {
            int(path.stem.removeprefix("rank-")): path.read_text(encoding="utf-8")
            for path in answers.glob("rank-*.json")
        }
    trouble = console.findings[-1] if code != ExitCode.GOOD and console.findings else None
    return RankAnswers(texts=texts, trouble=trouble)


@contextlib.contextmanager
def _with_progress(doing: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report every ten seconds what is being done, and for how long."""
    begun, ended = time.monotonic(), threading.Event()

    def report() -> None:
        while not ended.wait(_SAY_EVERY_S):
            say(f"{doing}: {time.monotonic() - begun:.0f} s so far")

    reporter = threading.Thread(target=report)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


def describe_failure(trouble: Finding) -> str:
    """Describe why the ranks failed; their logs are deleted with the folder they ran in."""
    parts = (trouble.what, trouble.why, *trouble.evidence.splitlines())
    return "\n".join(part for part in parts if part and not part.startswith("log: "))


def leave_answer(answers: str, rank: int, text: str) -> None:
    """Write a rank's answer where :func:`run_local_ranks` reads it."""
    write_atomically(Path(answers) / f"rank-{rank}.json", text, durable=False)
