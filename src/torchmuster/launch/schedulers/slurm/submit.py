"""Submitting a job script, and stopping the job."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm import jobs

# Characters that sbatch takes as they are, without quotes.
_PLAIN = re.compile(r"[\w%+,./:=@-]+")
_LONGEST_WARNING_S = 65535


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """What to ask of Slurm; what is None is left to the cluster's defaults.

    ``time`` and ``mem`` are as Slurm writes them (``2-12:00:00``, ``64G``). With ``warn_s`` the ranks
    get SIGUSR1 so long before the time is up; with ``no_kill`` the job outlives the loss of a node.
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


def render_script(
    spec: JobSpec, request: SlurmRequest, muster_command: Sequence[str], run_root: Path
) -> str:
    """Return the script; ``muster_command`` is the ``muster run …`` to become inside the job."""
    gpus = _gpus_per_node(spec, request)
    cpus = _cpus_per_node(spec, request)
    lines = [
        "#!/bin/sh",
        "# Written by muster run --slurm. It can also be submitted by hand: sbatch THIS-FILE",
        "",
        _directive("job-name", spec.name),
        _directive("chdir", spec.folder),
        "# One task on each node; muster starts the ranks of a node itself.",
        _directive("nodes", request.nodes),
        _directive("ntasks-per-node", 1),
        *(
            ["# A node that fails is left out; the others go on.", "#SBATCH --no-kill"]
            * request.no_kill
        ),
        *_submit_devices(gpus, cpus),
        *_limits(request),
        "# What muster run says (%j is the job's number). The folder has to be there before the job",
        "# starts. A job that is started again goes on in the same file.",
        _directive("output", _log_pattern(spec, run_root)),
        _directive("open-mode", "append"),
        "# When a node fails, or a job of more weight takes the nodes, back into the queue.",
        "#SBATCH --requeue",
        *_warning(request.warn_s),
        "# The job gets the environment of the shell that submits it: the virtual environment, loaded",
        "# modules and tokens of the ranks. Slurm keeps a copy of it for as long as it knows the job.",
        _directive("export", "ALL"),
        "",
        "# exec: muster takes the place of this shell, so that Slurm's signals reach it.",
        *_become(muster_command),
    ]
    return "\n".join(lines) + "\n"


def _become(muster_command: Sequence[str]) -> Iterator[str]:
    if any(char in word for word in muster_command for char in "$`"):
        yield "# shellcheck disable=SC2016 # the words are meant as they stand"
    yield f"exec {shlex.join(muster_command)}"


def _gpus_per_node(spec: JobSpec, request: SlurmRequest) -> int | None:
    """Return how many GPUs to ask for; refuse what cannot be meant."""
    asked = request.gpus_per_node
    if spec.hosts:
        raise Impossible(
            "--hosts and --slurm exclude each other",
            why="Slurm chooses the machines",
            fix="leave out --hosts, and say how many with --nodes",
        )
    if spec.device == "cpu":
        if asked:
            raise Impossible(
                f"--device cpu was asked for together with --gpus-per-node {asked}",
                why="GPUs would be reserved and not used",
                fix="leave out one of them",
            )
        return None
    if asked is None and spec.device == "gpu":
        asked = spec.ranks
        if asked is None:
            raise Impossible(
                "how many GPUs each node should have was not said",
                why="Slurm gives a job only the GPUs that it asks for",
                fix="--gpus-per-node 8",
            )
    if asked and spec.ranks is not None and spec.ranks > asked and not spec.share:
        raise Impossible(
            f"{spec.ranks} ranks per node were asked for, but only {asked} GPUs per node",
            why="each rank has a GPU of its own",
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
        yield "# The cores of the one task are those of the node's ranks together."
        yield _directive("cpus-per-task", cpus)
    else:
        yield "# Cores are not asked for, so the partition's default holds, which may be a single core"
        yield "# on each node: --cpus-per-task=N asks for more."


def _limits(request: SlurmRequest) -> Iterator[str]:
    for option in ("partition", "account", "qos", "time", "mem"):
        value = getattr(request, option)
        if value is not None:
            yield _directive(option, value)


def _warning(warn_s: int | None) -> Iterator[str]:
    if warn_s is None:
        return
    if not 1 <= warn_s <= _LONGEST_WARNING_S:
        raise Impossible(
            f"a warning {warn_s} s before the end was asked for",
            why=f"Slurm can warn 1 to {_LONGEST_WARNING_S} s before the end",
            fix="--warn 120s",
        )
    yield "# SIGUSR1 so many seconds before the time is up. B: it goes to this script alone, that is to"
    yield "# muster, which passes it on to the ranks."
    yield _directive("signal", f"B:USR1@{warn_s}")


def _log_pattern(spec: JobSpec, run_root: Path) -> str:
    """Return the log's path for sbatch: relative to the job's folder where possible."""
    folder = Path(spec.folder)
    absolute = run_root if run_root.is_absolute() else folder / run_root
    shown = absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute
    if any(char in str(absolute) for char in "%\\"):
        raise Impossible(
            f"the folder for runs is {str(absolute)!r}",
            why="in the path of a job's log, Slurm gives % and \\ a meaning of their own",
            fix="use a folder for runs without these in its path",
        )
    return f"{shown}/slurm-%j.log"


def _directive(option: str, value: object) -> str:
    """Return an option line. sbatch has its own quoting: a backslash counts inside quotes."""
    text = str(value)
    if not text.isprintable():
        raise Impossible(
            f"--{option} cannot be {text!r}",
            why="a job script has one option on each line",
            fix="use a text without line breaks and control characters",
        )
    if not _PLAIN.fullmatch(text):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        text = f'"{escaped}"'
    return f"#SBATCH --{option}={text}"


# Variables of an allocation that a new job must not inherit; these are not of an allocation.
_NOT_OF_A_JOB = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME", "SLURM_JWT"}


def submit_job(script: str, *, run_root: Path, environment: Mapping[str, str] | None = None) -> str:
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
    answer = jobs.require_slurm(["sbatch", "--parsable"], stdin=script, environment=kept)
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
    answer = jobs.run_slurm_command(["sinfo", "--noheader", f"--format={shape}"])
    lines = answer.out.splitlines() if answer is not None and answer.code == 0 else []
    return "; ".join(dict.fromkeys(line.strip() for line in lines)) or "sinfo does not answer"


def cancel_job(job: str) -> None:
    """Stop a job. One that has already ended is left in peace."""
    # Without --verbose scancel says nothing of a job that does not exist, and ends well.
    answer = jobs.require_slurm(["scancel", "--verbose", job])
    if "error:" not in answer.err or "already completing or completed" in answer.err:
        return
    kind = NotNow if answer.unreachable else MusterError
    raise kind(
        f"job {job} could not be cancelled",
        why=answer.err,
        fix="your jobs are shown by: squeue --me",
    )
