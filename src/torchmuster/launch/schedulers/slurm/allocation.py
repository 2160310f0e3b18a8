"""The Slurm allocation of this process: its nodes, their GPUs, and whether they suffice."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.decision import Decision
from torchmuster.errors import ExitCode, Impossible
from torchmuster.finding import Finding, Status
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm import jobs
from torchmuster.redaction import redact_command
from torchmuster.runfolder import RunFolder, list_runs
from torchmuster.units import format_seconds, plural

# A user's own script that ran this long is assumed to have made progress.
_LONG_S = 300.0
# A node list with more nodes than this is a typing error.
_MOST_NODES = 100_000
_NODE_GROUP = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")
# "     Nodes=node[1-3] CPU_IDs=0-3 Mem=0 GRES=gpu:a100:4(IDX:0-3)"
_SHARE = re.compile(r"^ +Nodes=(?P<nodes>\S+) CPU_IDs=\S* Mem=\S* GRES=(?P<gres>.*)$", re.MULTILINE)
_GPUS = re.compile(r"(?:^|,)(?:gres/|gres:)?gpu(?::[^,:()]+)??:(?P<count>\d+)(?=[,(]|$)")


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


def may_go_back(
    job: str,
    environment: Mapping[str, str],
    ask: jobs.Ask = jobs.run_slurm_command,
    *,
    why_not: str | None = None,
) -> Decision[bool]:
    """Decide whether to requeue the job that this process runs in.

    ``why_not`` is a known reason against it.
    """
    if why_not is not None:
        return Decision(value=False, reason=f"job {job} is not requeued: {why_not}")
    answer = ask(["scontrol", "show", "job", job])
    if answer is None or answer.code != 0:
        error = answer.err if answer is not None else "scontrol is not installed on this host"
        reason = (
            f"job {job} is not requeued: {error}; in a container, add this line to the job script after muster: "
            f"{requeue_line(environment)}"
        )
        return Decision(value=False, reason=reason)
    if re.search(r"\bRequeue=0\b", answer.out):
        reason = f"job {job} cannot be requeued (Requeue=0); submit it again to resume"
        return Decision(value=False, reason=reason)
    return Decision(value=True, reason=f"requeueing job {job}; it resumes when it starts again")


def requeue_line(environment: Mapping[str, str]) -> str:
    """Return the line of a job script that requeues the job if muster, on the line before, has saved."""
    job = "$SLURM_JOB_ID"
    if environment.get("SLURM_ARRAY_TASK_ID"):
        job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    return f'if [ $? -eq {int(ExitCode.SAVED)} ]; then scontrol requeue "{job}"; fi'


def requeue(job: str, ask: jobs.Ask = jobs.run_slurm_command) -> str | None:
    """Requeue the job that this process runs in; return the error, None if there is none.

    Slurm stops the job and this process, perhaps before this returns: print all messages before the
    call.
    """
    answer = ask(["scontrol", "requeue", job])
    if answer is not None and answer.code == 0:
        return None
    error = answer.err if answer is not None else "scontrol is not installed on this host"
    return f"job {job} is not requeued: {error}"


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

    ``gpus`` is for each node, in the order of ``nodes``; None where Slurm reports no GPUs.
    """

    job: str  # as srun --jobid takes it
    nodes: tuple[str, ...]
    gpus: tuple[int, ...] | None
    cores: int | None  # on the node of this process
    tasks_per_node: int | None  # None: not requested
    copies: int  # of this program that srun started
    restarts: int  # how often Slurm has requeued the job

    @property
    def gpus_per_node(self) -> int | None:
        """The GPUs of each node; None where unknown or not the same on all."""
        counts = set(self.gpus or ())
        return counts.pop() if len(counts) == 1 else None


def allocation_here(
    environment: Mapping[str, str], ask: jobs.Ask = jobs.run_slurm_command
) -> Allocation | None:
    """Return the allocation that this process runs in; None if it is not in one."""
    job = environment.get("SLURM_JOB_ID", "")
    node_list = environment.get("SLURM_JOB_NODELIST", "")
    if not job.isdecimal() or not node_list:
        return None
    nodes = _node_names(node_list, ask)
    return Allocation(
        job=job,
        nodes=nodes,
        gpus=_gpus(nodes, environment, ask),
        cores=_number(environment.get("SLURM_CPUS_ON_NODE")),
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
            why=f"the job runs on the nodes that Slurm allocated: {_few(allocation.nodes)}",
            fix="remove --hosts",
        )
    if allocation.copies > 1:
        raise Impossible(
            f"srun started muster run {allocation.copies} times",
            why="one muster run starts the ranks on all nodes of the job",
            fix="remove srun before muster run",
        )
    _check_gpus(allocation, spec)
    ranks = _ranks_per_node(allocation, spec)
    tasks = allocation.tasks_per_node
    if tasks is not None and tasks > 1 and ranks is not None and ranks != tasks:
        raise Impossible(
            f"{plural(ranks, 'rank')} per node requested, but {job} has {tasks} tasks per node",
            why="the two numbers must be equal",
            fix=f"--ranks {tasks}, or submit with: sbatch --ntasks-per-node=1",
        )


def few_cores(allocation: Allocation, spec: JobSpec) -> Finding | None:
    """Return a warning if several ranks share the single core that Slurm allocates by default."""
    ranks = _ranks_per_node(allocation, spec)
    if ranks is None or allocation.cores is None or allocation.cores >= ranks:
        return None
    return Finding(
        name="few-cores",
        status=Status.WARNING,
        what=f"{ranks} ranks share {plural(allocation.cores, 'core')} on each node",
        why=f"Slurm job {allocation.job} has no more cores; without --cpus-per-task a job may get a"
        " single core per node",
        fix=f"sbatch --cpus-per-task={ranks * 4}  # for the one task of each node",
    )


def expand_hostlist(node_list: str) -> tuple[str, ...]:
    """Expand ``node[01-03,7],login`` as Slurm does; raises ValueError if it is not a node list."""
    names: list[str] = []
    place = 0
    while place < len(node_list):
        group = _NODE_GROUP.match(node_list, place)
        if group is None:
            raise ValueError(f"{node_list!r} is not a node list")
        for name in _expand_group(group[1]):
            names.append(name)
            if len(names) > _MOST_NODES:
                raise ValueError(f"{node_list!r} names more than {_MOST_NODES} nodes")
        place = group.end()
    return tuple(names)


def _expand_group(text: str) -> Iterator[str]:
    before, bracket, rest = text.partition("[")
    if not bracket:
        yield text
        return
    inside, _, after = rest.partition("]")
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or not (last.isdecimal() if dash else True):
            raise ValueError(f"{text!r} is not a group of nodes")
        for number in range(int(first), int(last or first) + 1):
            for end in _expand_group(after):
                yield f"{before}{number:0{len(first)}d}{end}"


def gpus_by_node(job_text: str) -> dict[str, int]:
    """Return the job's GPUs on each node from the output of ``scontrol show -d job``."""
    found: dict[str, int] = {}
    for share in _SHARE.finditer(job_text):
        # An index list may contain commas: gpu:a100:2(IDX:0,3)
        gres = re.sub(r"\([^)]*\)", "", share["gres"].strip())
        for node in expand_hostlist(share["nodes"]):
            found[node] = _count_gpus(gres)
    return found


def _count_gpus(gres: str) -> int:
    return sum(int(match["count"]) for match in _GPUS.finditer(gres))


def _check_gpus(allocation: Allocation, spec: JobSpec) -> None:
    if spec.device == "cpu":
        return
    job = f"Slurm job {allocation.job}"
    gpus = allocation.gpus or ()
    if gpus and allocation.gpus_per_node is None:
        each = [f"{node} {count}" for node, count in zip(allocation.nodes, gpus, strict=True)]
        raise Impossible(
            f"the nodes of {job} have different numbers of GPUs",
            why=f"srun cannot give all of them to one step: {_few(each)}",
            fix=f"sbatch --nodes={len(each)} --gpus-per-node={max(gpus)}",
        )
    has, requested = allocation.gpus_per_node, spec.ranks
    # Where Slurm reports no GPUs, the nodes are queried later.
    if has and not spec.share and requested is not None and requested > has:
        raise Impossible(
            f"{plural(requested, 'GPU')} per node requested, but {job} has {has}",
            why="Slurm allocates only the GPUs that a job requests",
            fix=f"sbatch --gpus-per-node={requested}, or --ranks {has}",
        )


def _ranks_per_node(allocation: Allocation, spec: JobSpec) -> int | None:
    if spec.ranks is not None or spec.device == "cpu":
        return spec.ranks
    return allocation.gpus_per_node or None


def _node_names(node_list: str, ask: jobs.Ask) -> tuple[str, ...]:
    answer = ask(["scontrol", "show", "hostnames", node_list])
    if answer is not None and answer.code == 0 and answer.out.split():
        return tuple(answer.out.split())
    try:
        return expand_hostlist(node_list)
    except ValueError as error:
        raise Impossible(
            f"SLURM_JOB_NODELIST is {node_list!r}, which is not a node list",
            why=str(error),
            fix="run inside a Slurm job, or unset the variable: unset SLURM_JOB_ID",
        ) from error


def _gpus(
    nodes: Sequence[str], environment: Mapping[str, str], ask: jobs.Ask
) -> tuple[int, ...] | None:
    """Ask Slurm; if it does not answer, use what the job's environment states unambiguously."""
    answer = ask(["scontrol", "show", "-d", "job", job_id(environment) or ""])
    if answer is not None and answer.code == 0:
        by_node = gpus_by_node(answer.out)
        if all(node in by_node for node in nodes):
            return tuple(by_node[node] for node in nodes) if any(by_node.values()) else None
    on_each = _gpus_here(environment)
    total = _number(environment.get("SLURM_GPUS"))
    if not on_each or (total is not None and total != on_each * len(nodes)):
        return None
    return (on_each,) * len(nodes)


def _gpus_in(per_node: str) -> int:
    """Return the number of GPUs in the value of --gpus-per-node: 4, or a100:2,h100:2."""
    return _count_gpus(",".join("gpu:" + word for word in per_node.split(",")))


def _gpus_here(environment: Mapping[str, str]) -> int | None:
    if per_node := environment.get("SLURM_GPUS_PER_NODE"):
        return _gpus_in(per_node) or None
    if on_node := _number(environment.get("SLURM_GPUS_ON_NODE")):
        return on_node
    listed = environment.get("SLURM_JOB_GPUS") or environment.get("SLURM_STEP_GPUS")
    return len(listed.split(",")) if listed else None


def _tasks_per_node(environment: Mapping[str, str], nodes: int) -> int | None:
    if per_node := _number(environment.get("SLURM_NTASKS_PER_NODE")):
        return per_node
    tasks = _number(environment.get("SLURM_NTASKS"))
    return tasks // nodes if tasks and tasks % nodes == 0 else None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _few(parts: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(parts[:8])
    return shown if len(parts) <= 8 else f"{shown} and {len(parts) - 8} more"
