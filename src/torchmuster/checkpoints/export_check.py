"""Check a folder of exported weights in a fresh process.

The process is ``torchmuster.worker.exported``. It reads an :class:`ExportCheck` from standard input
and prints a :class:`CheckResult`, both as one line of JSON.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from torchmuster.checkpoints.store import decode_strictly
from torchmuster.errors import MusterError

PROGRAM = "torchmuster.worker.exported"
# Largest differences of logits, relative to the largest logit.
MERGED = 1e-4  # LoRA matrices added to float32 weights: sums in another order
SIXTEEN_BITS = 0.1  # weights or computation in 16 bits on one side only

# Download nothing, show no progress bars or warnings, and leave the GPUs to the training.
_SURROUNDINGS = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "CUDA_VISIBLE_DEVICES": "",
}
# A rank's place in its process group, which the new process does not join.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ExportCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of weights to check, after a merge if that is requested."""

    folder: str
    merge: bool = False  # first merge the adapter in it into the base model
    base_dtype: str = "float32"  # dtype of an adapter's base model in the run


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a check established; an error has ``what``."""

    difference: float | None = None  # of the logits, relative to the largest one
    limit: float = MERGED
    unchecked: str = ""  # what was not compared, and why
    what: str = ""
    why: str = ""
    fix: str = ""

    def sentences(self) -> list[str]:
        """Return which checks were made, with their results."""
        made = []
        if self.difference is not None:
            made.append(
                f"logits equal to the run's model (difference {self.difference:.1g}, "
                f"limit {self.limit:g} of the largest logit)"
            )
        if self.unchecked:
            made.append(self.unchecked)
        return made


def run_check(request: ExportCheck, *, limit_s: float | None = None) -> CheckResult:
    """Run a check in a fresh process; raise an error if the folder is wrong.

    A process that takes longer than ``limit_s`` seconds is killed: then nothing was compared.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", PROGRAM],
            input=msgspec.json.encode(request).decode(),
            env={**environment, **_SURROUNDINGS},
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return CheckResult(
            unchecked=f"names not compared: the check took longer than {limit_s:.0f} s"
        )
    result = _result(done)
    if result is None:
        raise MusterError(
            f"{Path(request.folder).name.strip('.')} was not checked: the check {_ending(done)}",
            why=(done.stderr.strip().splitlines() or ["it printed nothing"])[-1],
            fix="see above; for lack of memory, use a host with more memory",
        )
    if result.what:
        raise MusterError(result.what, why=result.why, fix=result.fix)
    return result


def _result(done: "subprocess.CompletedProcess[str]") -> CheckResult | None:
    try:
        return decode_strictly(done.stdout.splitlines()[-1].encode(), CheckResult)
    except (IndexError, ValueError):
        return None


def _ending(done: "subprocess.CompletedProcess[str]") -> str:
    if done.returncode < 0:
        return f"was killed by signal {-done.returncode}"
    return f"exited with code {done.returncode}"
