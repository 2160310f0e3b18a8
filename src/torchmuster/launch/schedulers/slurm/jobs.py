"""What Slurm says of a job, in plain words.

``scontrol show job`` is asked, because it needs no accounting database. Slurm forgets a job some
minutes after its end (MinJobAge, 300 s if the cluster does not say otherwise); it is then ``gone``.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torchmuster.errors import Impossible

# A busy controller answers late; one that has not answered by then will not.
PATIENCE_S = 30.0
_NO_ANSWER = (
    "unable to contact slurm controller",
    "socket timed out",
    "zero bytes were transmitted",
)


@dataclass(frozen=True, kw_only=True)
class SlurmAnswer:
    """How a client ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def unreachable(self) -> bool:
        """Whether the controller did not answer, so that nothing is known."""
        return any(text in self.err.lower() for text in _NO_ANSWER)


Ask = Callable[[Sequence[str]], SlurmAnswer | None]


def run_slurm_command(
    command: Sequence[str], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> SlurmAnswer | None:
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
        return SlurmAnswer(code=1, out="", err=words)
    return SlurmAnswer(code=done.returncode, out=done.stdout, err=done.stderr.strip())


def require_slurm(
    command: Sequence[str], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> SlurmAnswer:
    """Run a client to its end; it is an error if there is no such program here."""
    answer = run_slurm_command(command, stdin=stdin, environment=environment)
    if answer is None:
        raise Impossible(
            f"Slurm's {command[0]} is not on this machine",
            why="no folder on PATH has it",
            fix="run this on a login node of the cluster (there perhaps after: module load slurm)\n"
            "machines without Slurm are named by --hosts",
        )
    return answer


Kind = Literal[
    "pending",
    "requeued",
    "running",
    "suspended",
    "completing",
    "done",
    "failed",
    "cancelled",
    "timeout",
    "node-fail",
    "preempted",
    "gone",
    "unknown",
]

_KINDS: dict[str, Kind] = {
    "PENDING": "pending",
    "CONFIGURING": "pending",
    "REQUEUED": "requeued",
    "REQUEUE_FED": "requeued",
    "REQUEUE_HOLD": "requeued",
    "SPECIAL_EXIT": "requeued",
    "RUNNING": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "SUSPENDED": "suspended",
    "STOPPED": "suspended",
    "COMPLETING": "completing",
    "STAGE_OUT": "completing",
    "COMPLETED": "done",
    "FAILED": "failed",
    "BOOT_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "NODE_FAIL": "node-fail",
    "PREEMPTED": "preempted",
}
_FINAL: frozenset[Kind] = frozenset(
    {"done", "failed", "cancelled", "timeout", "node-fail", "preempted", "gone"}
)

# Why a job waits: Slurm's word for it, and ours.
_REASONS = {
    "None": "Slurm has not looked at it yet",
    "Resources": "waiting for enough nodes, GPUs or memory to become free",
    "Priority": "waiting behind jobs of higher priority",
    "BeginTime": "its earliest start time has not come yet (after a requeue that takes some minutes)",
    "Dependency": "waiting for another job to end",
    "Licenses": "waiting for a licence to become free",
    "Reservation": "waiting for its reservation to begin",
    "ReqNodeNotAvail": "a node that it needs is down, drained, or reserved (perhaps for maintenance)",
    "Nodes_required_for_job_are_DOWN": "nodes that it needs are down, drained, or kept for jobs of a"
    " higher partition",
    "NodeDown": "a node that it needs is down",
    "Prolog": "the nodes are being prepared",
    "Cleaning": "its last run is still being cleaned up",
    "InactiveLimit": "the limit for an inactive job was reached",
    "QOSMaxGRESPerUser": "you already use as many GPUs as your QOS allows",
    "QOSMaxJobsPerUserLimit": "you already run as many jobs as your QOS allows",
    "QOSMaxNodePerUserLimit": "you already use as many nodes as your QOS allows",
    "QOSMaxCpuPerUserLimit": "you already use as many cores as your QOS allows",
    "QOSMaxMemoryPerUser": "you already use as much memory as your QOS allows",
    "AssocMaxJobsLimit": "your account already runs as many jobs as it may",
    "AssocGrpGRES": "your account already uses as many GPUs as it may",
    "AssocGrpNodeLimit": "your account already uses as many nodes as it may",
    "AssocGrpCpuLimit": "your account already uses as many cores as it may",
    "AssocGrpCPUMinutesLimit": "your account has used up its time",
}
# Reasons that do not pass by themselves.
_HOPELESS = {
    "PartitionNodeLimit": "it asks for more nodes than the partition has or allows",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "PartitionConfig": "it asks for more than the partition allows (time, nodes or cores)",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node can ever meet what it asks for",
    "InvalidAccount": "the account does not exist, or you may not use it",
    "InvalidQOS": "the QOS does not exist, or you may not use it",
    "DependencyNeverSatisfied": "the job that it depends on did not end as needed",
    "JobHeldUser": "it is held by its owner; scontrol release lets it go",
    "JobHeldAdmin": "it is held by an administrator",
    "QOSMaxWallDurationPerJobLimit": "it asks for more time than your QOS allows",
    "QOSMaxGRESPerJob": "it asks for more GPUs than your QOS allows for one job",
    "QOSMaxGRESPerNode": "it asks for more GPUs on a node than your QOS allows",
    "QOSMaxNodePerJobLimit": "it asks for more nodes than your QOS allows for one job",
    "AssocMaxWallDurationPerJobLimit": "it asks for more time than your account allows",
}
_FAILURES = {
    "OUT_OF_MEMORY": "a node ran out of the memory that the job may use",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "its deadline passed",
    "TIMEOUT": "its time limit was reached",
    "NODE_FAIL": "a node failed",
    "PREEMPTED": "a job of more weight took its nodes",
}
# The step daemon ends with this "signal" where it cannot open the job's log (its folder is missing).
_NO_LOG = 53


@dataclass(frozen=True, kw_only=True)
class JobState:
    """How a job is doing. ``words`` is a sentence; ``slurm`` and ``reason`` are Slurm's own words."""

    job: str
    kind: Kind
    words: str
    slurm: str = ""
    reason: str = ""
    hopeless: bool = False  # waiting for something that does not come by itself
    nodes: str = ""
    restarts: int = 0
    exit_code: int | None = None
    signal: int | None = None
    log: Path | None = None

    @property
    def final(self) -> bool:
        """Whether nothing more will happen."""
        return self.kind in _FINAL


def poll_job(job: str, ask: Ask = require_slurm) -> JobState:
    """Ask Slurm how a job is doing. If Slurm does not answer, the state is ``unknown``."""
    answer = ask(["scontrol", "show", "job", job])
    if answer is not None and answer.code == 0 and "JobState=" in answer.out:
        return read_job_states(job, answer.out)
    said = answer.err if answer is not None else "scontrol is not on this machine"
    if "Invalid job id" in said:
        words = f"Slurm does not know job {job}, or no longer; it forgets jobs some minutes after their end"
        return JobState(job=job, kind="gone", words=words)
    return JobState(job=job, kind="unknown", words=f"Slurm does not answer: {said or 'no words'}")


def read_job_states(job: str, text: str) -> JobState:
    """Read what ``scontrol show job`` says.

    A job's name, folder and comment may hold anything, so a value is only looked for in the line that
    Slurm begins with a name of its own.
    """
    slurm = _value(text, "JobState", "JobState") or "UNKNOWN"
    reason = _value(text, "JobState", "Reason") or ""
    kind = _KINDS.get(slurm, "unknown")
    restarts = int(_value(text, "Requeue", "Restarts") or 0)
    code, _, signal = (_value(text, "Requeue", "ExitCode") or "0:0").partition(":")
    start = _value(text, "StartTime", "StartTime")
    nodes = _value(text, "NodeList", "NodeList") or ""
    log = re.search(r"^ +StdOut=(.+)$", text, re.MULTILINE)
    if kind == "pending" and restarts:
        kind = "requeued"
    state = JobState(
        job=job,
        kind=kind,
        words="",
        slurm=slurm,
        reason=reason,
        hopeless=kind in ("pending", "requeued") and _reason_word(reason) in _HOPELESS,
        nodes="" if nodes == "(null)" else nodes,
        restarts=restarts,
        exit_code=int(code) if kind in _FINAL else None,
        signal=int(signal) or None if kind in _FINAL else None,
        log=Path(log[1]) if log else None,
    )
    return replace(state, words=f"job {job} {_sentence(state, start)}")


def _sentence(state: JobState, start: str | None) -> str:
    on = f" on {state.nodes}" if state.nodes else ""
    match state.kind:
        case "pending" | "requeued":
            again = _again(state.restarts) if state.kind == "requeued" else ""
            never = "will not start by itself" if state.hopeless else "waits"
            expected = f"; Slurm expects {start}" if start and start[:1].isdigit() else ""
            return f"{again}{never}: {why_it_waits(state.reason, state.slurm)}{expected}"
        case "running":
            return f"runs{on}" + (f" (start {state.restarts + 1})" if state.restarts else "")
        case "completing":
            return f"is ending{on}"
        case "done":
            return f"ended well{on}"
        case "failed":
            return f"failed{on}: {_why_it_failed(state)}"
        case "cancelled":
            return f"was cancelled{on}"
        case "timeout" | "node-fail" | "preempted":
            return f"was ended{on}: {_FAILURES[state.slurm]}"
        case _:
            return f"is {state.slurm.lower()}{on}"


def _again(restarts: int) -> str:
    times = "once" if restarts == 1 else f"{restarts} times"
    return f"was put back into the queue ({times} so far) and "


def _why_it_failed(state: JobState) -> str:
    if state.slurm in _FAILURES:
        return _FAILURES[state.slurm]
    if state.signal == _NO_LOG:
        return f"Slurm could not open its log {state.log} on the node; is the folder there?"
    if state.signal:
        return f"signal {state.signal} ended it"
    return f"exit code {state.exit_code}"


def why_it_waits(reason: str, slurm: str = "PENDING") -> str:
    """Say in plain words why a job waits; Slurm's own word stands behind, for looking it up."""
    if slurm == "CONFIGURING":
        return "its nodes are being started"
    word = _reason_word(reason)
    plain = _HOPELESS.get(word) or _REASONS.get(word)
    return f"{plain} ({word})" if plain else f"Slurm gives the reason {reason or 'None'}"


def _reason_word(reason: str) -> str:
    """Take the first word: ``ReqNodeNotAvail,_UnavailableNodes:n[1-2]``."""
    return reason.partition(",")[0] or "None"


def _value(text: str, line: str, key: str) -> str | None:
    """Return ``key=…`` from the line that begins with ``line=``."""
    found = re.search(rf"^ +(?={line}=)(?:.* )?{key}=(\S*)", text, re.MULTILINE)
    return found[1] if found else None
