"""Run Slurm's own commands, and follow a job with what squeue reports about it."""

import codecs
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.errors import Impossible

# Timeout of Slurm's clients; a busy controller answers late.
PATIENCE_S = 30.0
# Slurm's controller serves all users; the log is only a file.
_ASK_EVERY_S, _READ_EVERY_S = 3.0, 0.25
_NO_ANSWER = (
    "unable to contact slurm controller",
    "socket timed out",
    "zero bytes were transmitted",
)
# Of squeue's %T; a job with another state may still run.
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
}


@dataclass(frozen=True, kw_only=True)
class SlurmAnswer:
    """Exit code and output of a Slurm client."""

    code: int
    out: str
    err: str

    @property
    def unreachable(self) -> bool:
        """Whether the controller did not answer, so that the state is unknown."""
        return any(text in self.err.lower() for text in _NO_ANSWER)


Ask = Callable[[Sequence[str]], SlurmAnswer | None]


def run_slurm_command(
    command: Sequence[str], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> SlurmAnswer | None:
    """Run a Slurm client; return None if the program is not installed."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            list(command),
            input=stdin,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        error = f"{command[0]}: Socket timed out: no answer in {PATIENCE_S:.0f} s"
        return SlurmAnswer(code=1, out="", err=error)
    return SlurmAnswer(code=done.returncode, out=done.stdout, err=done.stderr.strip())


def require_slurm(
    command: Sequence[str], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> SlurmAnswer:
    """Run a Slurm client; raise Impossible if the program is not installed."""
    answer = run_slurm_command(command, stdin=stdin, environment=environment)
    if answer is None:
        raise Impossible(
            f"Slurm's {command[0]} is not installed on this host",
            why="it is not in any folder of PATH",
            fix="run this on a login node of the cluster (if needed, run first: module load slurm)\n"
            "for hosts without Slurm use --hosts",
        )
    return answer


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job in squeue's words: ``PENDING Resources``, ``RUNNING None node[1-3]``."""

    text: str

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return not self.text or self.text.split()[0] in _ENDED

    @property
    def completed(self) -> bool:
        """Whether the job's script ended with exit code 0."""
        return self.text.startswith("COMPLETED")


def job_state(job: str, ask: Ask = require_slurm) -> JobState | None:
    """Return the state of a job; None if Slurm does not answer.

    The text is empty for a job that Slurm does not know: it forgets jobs some minutes after their end.
    """
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T %r %N"]
    answer = ask(command)
    if answer is None or answer.unreachable:
        return None
    lines = answer.out.splitlines() or [""]
    return JobState(text=lines[0].strip())


def follow_job(job: str, log: Path, ask: Ask = require_slurm) -> Iterator[JobState | str]:
    """Yield each change of the job's state and each new part of its log, until the job has ended.

    Stopping early, even with Ctrl-C, does not affect the job.
    """
    state = None
    tail = _Tail(log)
    next_question = time.monotonic()
    while True:
        ended = state is not None and state.ended
        if not ended and time.monotonic() >= next_question:
            answer = job_state(job, ask)
            next_question = time.monotonic() + _ASK_EVERY_S
            if answer is not None and answer != state:
                state = answer
                yield state
        text = tail.read()
        if text:
            yield text
        if ended:  # one round ago: on a shared disk the last lines appear late
            return
        time.sleep(_READ_EVERY_S)


class _Tail:
    """The new part of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """Return what was appended since the last call; opens the file again, as network disks require."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except OSError:  # does not exist yet, or is not on this host
            return ""
        self._offset += len(data)
        return self._decoder.decode(data)
