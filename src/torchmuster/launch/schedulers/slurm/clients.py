"""Asking Slurm's own command-line clients: argument vectors, no shell, never without an end."""

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.errors import Impossible

# A busy controller answers late; one that has not answered by then will not.
PATIENCE_S = 30.0
_NO_ANSWER = (
    "unable to contact slurm controller",
    "socket timed out",
    "zero bytes were transmitted",
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a client ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def unreachable(self) -> bool:
        """Whether the controller did not answer, so that nothing is known."""
        return any(text in self.err.lower() for text in _NO_ANSWER)


Ask = Callable[[Sequence[str]], Answer | None]


def ask(
    command: Sequence[str], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> Answer | None:
    """Run a client to its end; None if there is no such program here."""
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
        words = f"{command[0]}: Socket timed out: no answer in {PATIENCE_S:.0f} s"
        return Answer(code=1, out="", err=words)
    return Answer(code=done.returncode, out=done.stdout, err=done.stderr.strip())


def require(
    command: Sequence[str], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> Answer:
    """Run a client to its end; it is an error if there is no such program here."""
    answer = ask(command, stdin=stdin, environment=environment)
    if answer is None:
        raise Impossible(
            f"Slurm's {command[0]} is not on this machine",
            why="no folder on PATH has it",
            fix="run this on a login node of the cluster (there perhaps after: module load slurm)\n"
            "machines without Slurm are named by --hosts",
        )
    return answer
