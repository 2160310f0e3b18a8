"""Render and submit a Slurm job script, and cancel jobs."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm import jobs

# Characters that need no quotes in sbatch options.
_PLAIN = re.compile(r"[\w%+,./:=@-]+")
# A new job must not inherit an allocation's SLURM_ variables; these are not from an allocation.
_NOT_OF_A_JOB = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME", "SLURM_JWT"}


def render_script(
    spec: JobSpec,
    muster_command: Sequence[str],
    run_root: Path,
    *,
    nodes: int,
    no_kill: bool,
    sbatch_arguments: Sequence[str],
) -> str:
    """Return the job script; ``muster_command`` is the ``muster run …`` to run inside the job.

    ``sbatch_arguments`` come last and take precedence. With ``no_kill`` the job survives the loss of a node.
    """
    if spec.hosts:
        raise Impossible(
            "--hosts and --slurm cannot be combined",
            why="Slurm chooses the hosts",
            fix="remove --hosts, and set the number of nodes with --nodes",
        )
    lines = [
        "#!/bin/sh",
        "# Written by muster run --slurm. It can also be submitted by hand: sbatch THIS-FILE",
        "",
        _directive(f"--job-name={spec.name}"),
        _directive(f"--chdir={spec.folder}"),
        "# One task on each node; Muster starts the ranks of a node itself.",
        _directive(f"--nodes={nodes}"),
        _directive("--ntasks-per-node=1"),
        "# Output of muster run (%j is the job ID). The folder must exist before the job starts. A job",
        "# that is restarted appends to the same file.",
        _directive(f"--output={_log_pattern(spec, run_root)}"),
        _directive("--open-mode=append"),
        "# Requeue the job if a node fails or a job of higher priority preempts it.",
        _directive("--requeue"),
        "# The job gets the environment of the submitting shell: virtual environment, loaded modules and",
        "# tokens. Slurm stores a copy of it until it forgets the job.",
        _directive("--export=ALL"),
    ]
    if no_kill:
        lines += ["# If a node fails, the job continues on the others.", _directive("--no-kill")]
    if sbatch_arguments:
        lines += ["# From --sbatch.", _directive(*sbatch_arguments)]
    lines += ["", "# exec: Muster replaces this shell, so that it gets Slurm's signals."]
    lines += _exec_lines(muster_command)
    return "\n".join(lines) + "\n"


def _exec_lines(muster_command: Sequence[str]) -> Iterator[str]:
    if any(char in word for word in muster_command for char in "$`"):
        yield "# shellcheck disable=SC2016 # no expansion intended"
    yield f"exec {shlex.join(muster_command)}"


def log_of(job: str, run_root: Path) -> Path:
    """Return the log of a job that this module submitted."""
    return run_root / f"slurm-{job}.log"


def _log_pattern(spec: JobSpec, run_root: Path) -> str:
    """Return the log path for sbatch, relative to the job's folder where possible."""
    folder = Path(spec.folder)
    absolute = run_root if run_root.is_absolute() else folder / run_root
    shown = absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute
    if any(char in str(absolute) for char in "%\\"):
        raise Impossible(
            f"the run root {str(absolute)!r} contains % or \\",
            why="in the path of a job's log, % and \\ have a special meaning for Slurm",
            fix="use a run root without these characters in its path",
        )
    return str(log_of("%j", shown))


def _directive(*arguments: str) -> str:
    """Return an option line. In sbatch's quoting, a backslash is special inside quotes."""
    quoted = []
    for argument in arguments:
        if not argument.isprintable():
            raise Impossible(
                f"sbatch cannot be given {argument!r}",
                why="a job script has one line of options",
                fix="use a value without line breaks and control characters",
            )
        if not _PLAIN.fullmatch(argument):
            name, equals, value = argument.partition("=")
            if not equals or not _PLAIN.fullmatch(name):
                name, value = "", argument
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            argument = f'{name}{equals if name else ""}"{escaped}"'
        quoted.append(argument)
    return f"#SBATCH {' '.join(quoted)}"


def submit_job(script: str, *, run_root: Path, environment: Mapping[str, str] | None = None) -> str:
    """Submit a script to Slurm and return the job ID.

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
    environment = os.environ if environment is None else environment
    for_sbatch = {
        name: value
        for name, value in environment.items()
        if not name.startswith("SLURM_") or name in _NOT_OF_A_JOB
    }
    answer = jobs.require_slurm(["sbatch", "--parsable"], stdin=script, environment=for_sbatch)
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
