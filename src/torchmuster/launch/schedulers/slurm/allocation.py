"""The Slurm allocation of this process: its nodes, their GPUs, and whether they suffice."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmuster.errors import Impossible
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm import jobs
from torchmuster.redaction import redact_command
from torchmuster.runfolder import RunFolder, list_runs
from torchmuster.units import format_seconds, name_several, plural

# A user's own script that ran this long is assumed to have made progress.
_LONG_S = 300.0
# Of a node list that names more than one node.
_SEVERAL = re.compile(r"[\[,]")


def job_id(environment: Mapping[str, str]) -> str | None:
    """Return the ID by which Slurm's commands address the job of this process; None outside a job.

    The job ID of one task of a job array is also that of the array: ``scontrol requeue`` and ``scancel`` with it apply
    to all tasks. That task is addressed as ``ARRAY_TASK``. The other tasks keep their own job ID, because a job that
    was submitted from an array task inherits the array's variables.
    """
    job = environment.get("SLURM_JOB_ID")
    task = environment.get("SLURM_ARRAY_TASK_ID")
    if task and job == environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{job}_{task}"
    return job


def would_not_get_on(
    spec: JobSpec, *, saved_new: bool, is_newer: bool, warned: bool, took_s: float
) -> str | None:
    """Return why a job that exited with 75 would be requeued forever; None if it makes progress.

    ``saved_new``: its ranks say that they saved; ``is_newer``: there is a newer checkpoint than at the start.
    """
    if spec.checkpoints is not None and not saved_new and not is_newer:
        return "it saved nothing new within its time limit; increase the limit: --sbatch '--time=…'"
    if spec.checkpoints is None and not warned and took_s < _LONG_S:
        return (
            f"it exited with code 75 after {format_seconds(took_s)} without a warning signal, "
            "and could be requeued forever"
        )
    return None


def requeue(job: str, ask: jobs.Ask = jobs.run_slurm_command) -> str | None:
    """Requeue the job that this process runs in; return the error, None if there is none.

    Slurm stops the job and this process, perhaps before this returns: print all messages before the
    call.
    """
    answer = ask(["scontrol", "requeue", job])
    if answer is None:
        return "scontrol is not installed on this host, as in a container: run it in the job script after muster, if that exits with 75"
    return answer.err if answer.code != 0 else None


def earlier_run(spec: JobSpec, root: Path, environment: Mapping[str, str]) -> RunFolder | None:
    """Return the newest run of the same command in the same Slurm job; None on its first start."""
    job = job_id(environment)
    if job is None or environment.get("SLURM_RESTART_COUNT", "0") == "0":
        return None
    parts = redact_command(spec.command)
    for run in list_runs(root):
        known = run_state.read_job(run)
        # Arguments about the run folder are at the end of the command.
        if known is not None and known.slurm_job == job and known.command[: len(parts)] == parts:
            return run
    return None


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The resources of the Slurm job that this process is part of.

    ``gpus_per_node`` is None where Slurm does not report it.
    """

    job: str  # as srun --jobid takes it
    nodes: tuple[str, ...]
    gpus_per_node: int | None
    tasks_per_node: int | None  # None: not requested
    copies: int  # of this program that srun started
    restarts: int  # how often Slurm has requeued the job


def allocation_here(
    environment: Mapping[str, str], ask: jobs.Ask = jobs.run_slurm_command
) -> Allocation | None:
    """Return the allocation that this process runs in; None if it is not in one."""
    job = environment.get("SLURM_JOB_ID", "")
    node_list = environment.get("SLURM_JOB_NODELIST", "")
    if not job.isdecimal() or not node_list:
        return None
    nodes = _node_names(job, node_list, ask)
    return Allocation(
        job=job,
        nodes=nodes,
        gpus_per_node=_gpus_per_node(environment, len(nodes)),
        tasks_per_node=_tasks_per_node(environment, len(nodes)),
        copies=_number(environment.get("SLURM_STEP_NUM_TASKS")) or 1,
        restarts=_number(environment.get("SLURM_RESTART_COUNT")) or 0,
    )


def check_counts(allocation: Allocation, spec: JobSpec) -> None:
    """Raise, before anything starts, if the allocation cannot satisfy the job."""
    job = f"Slurm job {allocation.job}"
    if spec.hosts:
        raise Impossible(
            f"--hosts was given inside {job}",
            why=f"the job runs on the nodes that Slurm allocated: {name_several(allocation.nodes)}",
            fix="remove --hosts",
        )
    if allocation.copies > 1:
        raise Impossible(
            f"srun started muster run {allocation.copies} times",
            why="one muster run starts the ranks on all nodes of the job",
            fix="remove srun before muster run",
        )
    has, requested = allocation.gpus_per_node, spec.ranks
    is_on_gpus = spec.device != "cpu" and not spec.share
    if is_on_gpus and has and requested is not None and requested > has:
        raise Impossible(
            f"{plural(requested, 'GPU')} per node requested, but {job} has {has}",
            why="Slurm allocates only the GPUs that a job requests",
            fix=f"sbatch --gpus-per-node={requested}, or --ranks {has}",
        )
    ranks = _ranks_per_node(allocation, spec)
    tasks = allocation.tasks_per_node
    if tasks is not None and tasks > 1 and ranks is not None and ranks != tasks:
        raise Impossible(
            f"{plural(ranks, 'rank')} per node requested, but {job} has {tasks} tasks per node",
            why="the two numbers must be equal",
            fix=f"--ranks {tasks}, or submit with: sbatch --ntasks-per-node=1",
        )


def _ranks_per_node(allocation: Allocation, spec: JobSpec) -> int | None:
    if spec.ranks is not None or spec.device == "cpu":
        return spec.ranks
    return allocation.gpus_per_node or None


def _node_names(job: str, node_list: str, ask: jobs.Ask) -> tuple[str, ...]:
    if not _SEVERAL.search(node_list):
        return (node_list,)
    answer = ask(["scontrol", "show", "hostnames", node_list])
    if answer is None:
        raise Impossible(
            f"Slurm job {job} has several nodes ({node_list}), but Slurm's programs are not installed here",
            why="Muster starts the ranks on the other nodes with srun; a container has it only if it is mounted",
            fix="mount Slurm's programs, its configuration and munge's socket into the container, or start muster "
            "outside the container, or use one node",
        )
    if answer.code != 0 or not answer.out.split():
        raise Impossible(
            f"Slurm does not know the nodes {node_list!r} of SLURM_JOB_NODELIST",
            why=answer.err or "scontrol show hostnames lists none",
            fix="run inside a Slurm job, or unset the variable: unset SLURM_JOB_ID",
        )
    return tuple(answer.out.split())


def _gpus_per_node(environment: Mapping[str, str], nodes: int) -> int | None:
    """Return the GPUs of each node by the job's variables; None if they do not say."""
    on_node = _number(environment.get("SLURM_GPUS_ON_NODE"))
    total = _number(environment.get("SLURM_GPUS"))
    if total and total != (on_node or 0) * nodes:
        return None
    if on_node:
        return on_node
    per_task = _number(environment.get("SLURM_GPUS_PER_TASK"))
    tasks = _tasks_per_node(environment, nodes)
    if per_task and tasks:
        return per_task * tasks
    per_node = environment.get("SLURM_GPUS_PER_NODE", "")  # 4, or a100:2,h100:2
    counts = [_number(kind.rpartition(":")[2]) or 0 for kind in per_node.split(",")]
    return sum(counts) or None


def _tasks_per_node(environment: Mapping[str, str], nodes: int) -> int | None:
    if per_node := _number(environment.get("SLURM_NTASKS_PER_NODE")):
        return per_node
    tasks = _number(environment.get("SLURM_NTASKS"))
    return tasks // nodes if tasks and tasks % nodes == 0 else None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None
