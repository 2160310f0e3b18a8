"""Render and submit a Slurm job script, and cancel jobs."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm import jobs

# Characters that need no quotes in sbatch options.
_PLAIN = re.compile(r"[\w%+,./:=@-]+")
_LONGEST_WARNING_S = 65535


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """The resources to request from Slurm; None uses the cluster's default.

    ``time`` and ``mem`` use Slurm's format (``2-12:00:00``, ``64G``). The ranks get ``warn_signal`` (USR1 or USR2)
    ``warn_s`` seconds before the time limit; with ``no_kill`` the job survives the loss of a node.
    """

    nodes: int = 1
    no_kill: bool = False
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    mem: str | None = None
    warn_s: int | None = None
    warn_signal: str = "USR1"


def render_script(
    spec: JobSpec, request: SlurmRequest, muster_command: Sequence[str], run_root: Path
) -> str:
    """Return the job script; ``muster_command`` is the ``muster run …`` to run inside the job."""
    gpus = _gpus_per_node(spec, request)
    cpus = _cpus_per_node(spec, request)
    lines = [
        "#!/bin/sh",
        "# Written by muster run --slurm. It can also be submitted by hand: sbatch THIS-FILE",
        "",
        _directive("job-name", spec.name),
        _directive("chdir", spec.folder),
        "# One task on each node; Muster starts the ranks of a node itself.",
        _directive("nodes", request.nodes),
        _directive("ntasks-per-node", 1),
        *(
            ["# If a node fails, the job continues on the others.", "#SBATCH --no-kill"]
            * request.no_kill
        ),
        *_submit_devices(gpus, cpus),
        *_limits(request),
        "# Output of muster run (%j is the job ID). The folder must exist before the job starts. A job",
        "# that is restarted appends to the same file.",
        _directive("output", _log_pattern(spec, run_root)),
        _directive("open-mode", "append"),
        "# Requeue the job if a node fails or a job of higher priority preempts it.",
        "#SBATCH --requeue",
        *_warning(request.warn_s, request.warn_signal),
        "# The job gets the environment of the submitting shell: virtual environment, loaded modules and",
        "# tokens. Slurm stores a copy of it until it forgets the job.",
        _directive("export", "ALL"),
        "",
        *(
            [
                "# srun starts the node agents in the container. The launcher is outside it, so torchmuster is needed in",
                "# both, in the same version.",
            ]
            if spec.container
            else []
        ),
        "# exec: Muster replaces this shell, so that it gets Slurm's signals.",
        *_become(muster_command),
    ]
    return "\n".join(lines) + "\n"


def _become(muster_command: Sequence[str]) -> Iterator[str]:
    if any(char in word for word in muster_command for char in "$`"):
        yield "# shellcheck disable=SC2016 # no expansion intended"
    yield f"exec {shlex.join(muster_command)}"


def _gpus_per_node(spec: JobSpec, request: SlurmRequest) -> int | None:
    """Return the number of GPUs to request; raise for contradictory requests."""
    asked = request.gpus_per_node
    if spec.hosts:
        raise Impossible(
            "--hosts and --slurm cannot be combined",
            why="Slurm chooses the hosts",
            fix="remove --hosts, and set the number of nodes with --nodes",
        )
    if spec.device == "cpu":
        if asked:
            raise Impossible(
                f"--device cpu and --gpus-per-node {asked} contradict each other",
                why="GPUs would be reserved but not used",
                fix="remove one of them",
            )
        return None
    if asked is None and spec.device == "gpu":
        asked = spec.ranks
        if asked is None:
            raise Impossible(
                "the number of GPUs per node is missing",
                why="Slurm allocates only the GPUs that a job requests",
                fix="--gpus-per-node 8",
            )
    if asked and spec.ranks is not None and spec.ranks > asked and not spec.share:
        raise Impossible(
            f"{spec.ranks} ranks per node requested, but only {asked} GPUs per node",
            why="each rank needs its own GPU",
            fix=f"--gpus-per-node {spec.ranks}",
        )
    return asked


def _cpus_per_node(spec: JobSpec, request: SlurmRequest) -> int | None:
    if request.cpus_per_node is None and spec.device == "cpu":
        return spec.ranks
    return request.cpus_per_node


def _submit_devices(gpus: int | None, cpus: int | None) -> Iterator[str]:
    if gpus:
        yield _directive("gpus-per-node", gpus)
    if cpus is not None:
        yield "# All ranks of a node share the cores of its one task."
        yield _directive("cpus-per-task", cpus)
    else:
        yield "# No cores requested: the partition's default applies, which may be a single core per node."
        yield "# muster run --cpus-per-node N requests more."


def _limits(request: SlurmRequest) -> Iterator[str]:
    for option in ("partition", "account", "qos", "time", "mem"):
        value = getattr(request, option)
        if value is not None:
            yield _directive(option, value)


def _warning(warn_s: int | None, name: str) -> Iterator[str]:
    if warn_s is None:
        return
    if not 1 <= warn_s <= _LONGEST_WARNING_S:
        raise Impossible(
            f"invalid warning time: {warn_s} s before the time limit",
            why=f"Slurm can warn 1 to {_LONGEST_WARNING_S} s before the time limit",
            fix="--warn 120s",
        )
    yield f"# Send SIG{name} this many seconds before the time limit. B: only to this script, that is to"
    yield "# Muster, which forwards it to the ranks."
    yield _directive("signal", f"B:{name}@{warn_s}")


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
    return f"{shown}/slurm-%j.log"


def _directive(option: str, value: object) -> str:
    """Return an option line. In sbatch's quoting, a backslash is special inside quotes."""
    text = str(value)
    if not text.isprintable():
        raise Impossible(
            f"--{option} cannot be {text!r}",
            why="a job script has one option per line",
            fix="use a value without line breaks and control characters",
        )
    if not _PLAIN.fullmatch(text):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        text = f'"{escaped}"'
    return f"#SBATCH --{option}={text}"


# A new job must not inherit an allocation's SLURM_ variables; these are not from an allocation.
_NOT_OF_A_JOB = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME", "SLURM_JWT"}


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
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith("SLURM_") or name in _NOT_OF_A_JOB
    }
    answer = jobs.require_slurm(["sbatch", "--parsable"], stdin=script, environment=kept)
    if answer.unreachable:
        raise NotNow(
            "Slurm's controller did not answer; the job may or may not have been submitted",
            why=answer.err,
            fix="check with: squeue --me; if it is not listed, submit again later",
        )
    number = answer.out.strip().partition(";")[0]
    if answer.code != 0 or not number.isdecimal():
        raise _refused(answer.err or answer.out.strip())
    return number


def _refused(said: str) -> Impossible:
    """Return the error for sbatch's output, with the cluster's valid values as the fix."""
    last = said.splitlines()[-1] if said else "sbatch gave no reason"
    short = re.sub(r"^sbatch: (?:error|fatal): (?:Batch job submission failed: )?", "", last)
    return Impossible(f"Slurm rejected the job: {short}", why=said, fix=_way_out(said.lower()))


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
    return "see the output of sbatch above"


def _partitions(shape: str) -> str:
    answer = jobs.run_slurm_command(["sinfo", "--noheader", f"--format={shape}"])
    lines = answer.out.splitlines() if answer is not None and answer.code == 0 else []
    return "; ".join(dict.fromkeys(line.strip() for line in lines)) or "sinfo does not answer"


def cancel_job(job: str) -> None:
    """Cancel a job; do nothing if it has already ended."""
    if not re.fullmatch(r"\d+(?:[_+]\d+)?", job):  # from a run folder: not a flag of scancel
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
