"""A program of ours on fresh ranks of this machine: started quietly, awaited, and what each rank wrote.

Whatever a rank does to itself (memory that runs out, a group that is broken) ends with its process, so that one
program cannot disturb the next.
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
from torchmuster.launch.launcher.console import TerminalConsole
from torchmuster.launch.launcher.launch_job import launch_job
from torchmuster.launch.transports.local import LocalTransport
from torchmuster.runfolder import create_run_folder, write_atomically

# A rank that failed cannot be helped by the others, and a hang is no answer.
_GRACE_S = 1.0
_HANGS_AFTER_S = 60.0
_SAY_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RankOutput:
    """What became of the ranks: the texts that they left, by rank; why they failed, if they did."""

    texts: dict[int, str]
    trouble: Finding | None


class _Quiet(TerminalConsole):
    """A voice that keeps findings and shows nothing."""

    findings: tuple[Finding, ...] = ()

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Show nothing for as long as the ranks run."""
        yield

    def world(self, size: int) -> None:
        """Keep quiet."""

    def say(self, text: str) -> None:
        """Keep quiet."""

    def output(self, rank: int, text: str) -> None:
        """Keep quiet: it is in the rank's log."""

    def show(self, findings: Sequence[Finding]) -> None:
        """Keep what was found."""
        self.findings += tuple(findings)

    def finish(self) -> None:
        """Have nothing left to show."""


def run_fresh_ranks(
    program: str,
    request: str,
    *,
    ranks: int,
    device: Literal["cpu", "gpu"],
    folder: str,
    name: str,
    environment: dict[str, str] | None = None,
    typed: tuple[str, ...] = ("plan",),
    doing: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> RankOutput:
    """Run a module as so many ranks and wait for its end.

    It is given two words: a file that holds the ``request``, and a folder in which each rank leaves its
    answer as ``rank-N.json``. ``folder`` is where it runs, ``typed`` what people typed after ``muster``.
    ``say`` hears every ten seconds what the ranks are ``doing``. ``KeyboardInterrupt`` leaves no rank behind.
    """
    with tempfile.TemporaryDirectory(prefix=f"muster-{typed[0]}-") as place:
        asked, answers = Path(place) / "request.json", Path(place) / "answers"
        answers.mkdir()
        write_atomically(asked, request, durable=False)
        spec = JobSpec(
            name=name,
            command=(program, str(asked), str(answers)),
            module=True,
            typed=typed,
            folder=folder,
            device=device,
            ranks=ranks,
            environment=environment or {},
            limits=Limits(grace_s=_GRACE_S, end_hangs_s=_HANGS_AFTER_S),
        )
        folder_of_run = create_run_folder(Path(place), name)
        console = _Quiet(folder_of_run)
        transport = LocalTransport(socket.gethostname())
        with _heard_of(f"{doing or name} on {ranks} {'rank' if ranks == 1 else 'ranks'}", say):
            code = launch_job(spec, transport, folder_of_run, lambda _: console)
        if code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        texts = {
            int(path.stem.removeprefix("rank-")): path.read_text(encoding="utf-8")
            for path in answers.glob("rank-*.json")
        }
    trouble = console.findings[-1] if code != ExitCode.GOOD and console.findings else None
    return RankOutput(texts=texts, trouble=trouble)


@contextlib.contextmanager
def _heard_of(doing: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say every ten seconds what is being done, and since when."""
    begun, ended = time.monotonic(), threading.Event()

    def speak() -> None:
        while not ended.wait(_SAY_EVERY_S):
            say(f"{doing}: {time.monotonic() - begun:.0f} s so far")

    speaker = threading.Thread(target=speak)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()


def describe_failure(trouble: Finding) -> str:
    """Say what became of the ranks; their logs are gone with the folder that they ran in."""
    parts = (trouble.what, trouble.why, *trouble.evidence.splitlines())
    return "\n".join(part for part in parts if part and not part.startswith("log: "))


def leave_answer(answers: str, rank: int, text: str) -> None:
    """Write a rank's answer to where :func:`run` looks for it."""
    write_atomically(Path(answers) / f"rank-{rank}.json", text, durable=False)
