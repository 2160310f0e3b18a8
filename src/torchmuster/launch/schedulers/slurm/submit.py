"""Submitting a job script, and stopping the job."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.launch.schedulers.slurm import clients

# Variables of an allocation that a new job must not inherit; these are not of an allocation.
_NOT_OF_A_JOB = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME", "SLURM_JWT"}


def submit(script: str, *, run_root: Path, environment: Mapping[str, str] | None = None) -> str:
    """Hand a script to Slurm and return the job's number.

    The folder of its log is made first: without it Slurm would start the job and end it at once.
    """
    try:
        run_root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Impossible(
            f"cannot make the folder {run_root} for the job's log",
            why=error.strerror or str(error),
            fix="use a folder that exists, that you may write to, on a disk that the nodes share",
        ) from error
    environment = os.environ if environment is None else environment
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith("SLURM_") or name in _NOT_OF_A_JOB
    }
    answer = clients.require(["sbatch", "--parsable"], stdin=script, environment=kept)
    if answer.unreachable:
        raise NotNow(
            "Slurm's controller did not answer, so it is not certain whether it took the job",
            why=answer.err,
            fix="look with: squeue --me, and try again later",
        )
    number = answer.out.strip().partition(";")[0]
    if answer.code != 0 or not number.isdecimal():
        raise _refused(answer.err or answer.out.strip())
    return number


def _refused(said: str) -> Impossible:
    """Return the error for what sbatch said, with what the cluster has as the way out."""
    last = said.splitlines()[-1] if said else "sbatch gave no reason"
    short = re.sub(r"^sbatch: (?:error|fatal): (?:Batch job submission failed: )?", "", last)
    return Impossible(f"Slurm did not take the job: {short}", why=said, fix=_way_out(said.lower()))


def _way_out(said: str) -> str:
    if "account" in said or "qos" in said:
        return "your accounts and QOS: sacctmgr show associations user=$USER format=account,qos"
    if "gres" in said and "invalid" in said:
        return f"GPUs here: {_partitions('%P %D nodes with %G')}"
    if "partition" in said:
        return f"partitions here: {_partitions('%P')} (* is the default)"
    if "time" in said:
        return f"time limits here: {_partitions('%P %l')}"
    if "node" in said or "memory" in said or "cpu" in said:
        shape = "%P %D nodes with %c cores, %m MB, GPUs: %G"
        return f"partitions here: {_partitions(shape)}"
    return "sbatch's own words are above"


def _partitions(shape: str) -> str:
    answer = clients.ask(["sinfo", "--noheader", f"--format={shape}"])
    lines = answer.out.splitlines() if answer is not None and answer.code == 0 else []
    return "; ".join(dict.fromkeys(line.strip() for line in lines)) or "sinfo does not answer"


def cancel(job: str) -> None:
    """Stop a job. One that has already ended is left in peace."""
    # Without --verbose scancel says nothing of a job that does not exist, and ends well.
    answer = clients.require(["scancel", "--verbose", job])
    if "error:" not in answer.err or "already completing or completed" in answer.err:
        return
    kind = NotNow if answer.unreachable else MusterError
    raise kind(
        f"job {job} could not be cancelled",
        why=answer.err,
        fix="your jobs are shown by: squeue --me",
    )
