"""Submit a Slurm job that runs a command line, and cancel jobs."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm import jobs

# A new job must not inherit an allocation's SLURM_ variables; these are not from an allocation.
_NOT_OF_A_JOB = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME", "SLURM_JWT"}


def sbatch_command(
    spec: JobSpec,
    muster_command: Sequence[str],
    run_root: Path,
    *,
    nodes: int,
    no_kill: bool,
    sbatch_arguments: Sequence[str],
) -> list[str]:
    """Return the sbatch command; ``muster_command`` is the ``muster run …`` to run inside the job.

    ``sbatch_arguments`` come last and take precedence. With ``no_kill`` the job survives the loss of a node. The job gets the
    environment of the submitting shell: virtual environment, loaded modules and tokens.
    """
    if spec.hosts:
        raise Impossible(
            "--hosts and --slurm cannot be combined",
            why="Slurm chooses the hosts",
            fix="remove --hosts, and set the number of nodes with --nodes",
        )
    # In the path of a job's log, % begins a variable.
    logs = str(Path(spec.folder) / run_root).replace("%", "%%")
    return [
        "sbatch",
        "--parsable",
        f"--job-name={spec.name}",
        f"--chdir={spec.folder}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",  # Muster starts the ranks of a node itself
        f"--output={logs}/slurm-%j.log",  # as in log_of
        "--open-mode=append",  # also by a job that is restarted
        "--requeue",  # if a node fails or a job of higher priority preempts it
        "--export=ALL",
        *(["--no-kill"] if no_kill else []),
        *sbatch_arguments,
        # exec: Muster replaces the shell, so that it gets Slurm's signals.
        f"--wrap=exec {shlex.join(muster_command)}",
    ]


def log_of(job: str, run_root: Path) -> Path:
    """Return the log of a job that this module submitted."""
    return run_root / f"slurm-{job}.log"


def submit_job(command: Sequence[str], *, run_root: Path) -> str:
    """Run an sbatch command and return the job ID.

    This creates the folder of the log first: without it, Slurm starts the job and kills it at once.
    """
    try:
        run_root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Impossible(
            f"cannot create the folder {run_root} for the job's log",
            why=error.strerror or str(error),
            fix="use a writable folder on a disk that the nodes share",
        ) from error
    for_sbatch = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name in _NOT_OF_A_JOB
    }
    answer = jobs.require_slurm(command, environment=for_sbatch)
    if answer.unreachable:
        raise NotNow(
            "Slurm's controller did not answer; the job may or may not have been submitted",
            why=answer.err,
            fix="check with: squeue --me; if it is not listed, submit again later",
        )
    number = answer.out.strip().partition(";")[0]
    if answer.code != 0 or not number.isdecimal():
        raise Impossible(
            "Slurm rejected the job",
            why=answer.err or answer.out.strip() or "sbatch gave no reason",
            fix="sinfo -o '%P %l %D nodes with %c cores, %m MB, GPUs: %G'  # what there is; arguments of sbatch: "
            "--sbatch 'ARGS'",
        )
    return number


def cancel_job(job: str) -> None:
    """Cancel a job; do nothing if it has already ended."""
    if not re.fullmatch(r"\d+(?:_\d+)?", job):  # from a run folder: not a flag of scancel
        raise MusterError(f"cannot cancel job {job!r}", why="this is not the number of a job")
    # Without --verbose, scancel prints nothing for an unknown job and exits with code 0.
    answer = jobs.require_slurm(["scancel", "--verbose", job])
    if "error:" not in answer.err or "already completing or completed" in answer.err:
        return
    kind = NotNow if answer.unreachable else MusterError
    raise kind(
        f"cannot cancel job {job}",
        why=answer.err,
        fix="list your jobs with: squeue --me",
    )
