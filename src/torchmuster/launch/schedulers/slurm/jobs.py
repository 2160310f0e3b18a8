"""Run Slurm's own commands."""

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.errors import Impossible

# Timeout of Slurm's clients; a busy controller answers late.
PATIENCE_S = 30.0
_NO_ANSWER = (
    "unable to contact slurm controller",
    "socket timed out",
    "zero bytes were transmitted",
)


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
    command: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> SlurmAnswer | None:
    """Run a Slurm client; return None if the program is not installed."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
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
    command: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> SlurmAnswer:
    """Run a Slurm client; raise Impossible if the program is not installed."""
    answer = run_slurm_command(command, environment=environment)
    if answer is None:
        raise Impossible(
            f"Slurm's {command[0]} is not installed on this host",
            why="it is not in any folder of PATH",
            fix="run this on a login node of the cluster (if needed, run first: module load slurm)\n"
            "for hosts without Slurm use --hosts",
        )
    return answer
