"""Read the state of a Slurm job and describe it in a sentence.

This uses ``scontrol show job``, which needs no accounting database. Slurm forgets a job some minutes
after its end (MinJobAge, 300 s by default); its state is then ``gone``.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

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
    command: Sequence[str], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> SlurmAnswer | None:
    """Run a Slurm client; return None if the program is not installed."""
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
    """Run a Slurm client; raise Impossible if the program is not installed."""
    answer = run_slurm_command(command, stdin=stdin, environment=environment)
    if answer is None:
        raise Impossible(
            f"Slurm's {command[0]} is not installed on this host",
            why="it is not in any folder of PATH",
            fix="run this on a login node of the cluster (if needed, run first: module load slurm)\n"
            "for hosts without Slurm use --hosts",
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

# Why a job is pending: Slurm's reason code and our description.
_REASONS = {
    "None": "Slurm has not considered it yet",
    "Resources": "waiting for enough nodes, GPUs or memory to become free",
    "Priority": "waiting behind jobs of higher priority",
    "BeginTime": "its earliest start time is in the future (after a requeue, a few minutes)",
    "Dependency": "waiting for another job to end",
    "Licenses": "waiting for a license to become free",
    "Reservation": "waiting for its reservation to begin",
    "ReqNodeNotAvail": "a required node is down, drained, or reserved (perhaps for maintenance)",
    "Nodes_required_for_job_are_DOWN": "required nodes are down, drained, or reserved for jobs in a"
    " higher-priority partition",
    "NodeDown": "a required node is down",
    "Prolog": "the nodes are being prepared",
    "Cleaning": "its last run is still being cleaned up",
    "InactiveLimit": "the limit for an inactive job was reached",
    "QOSMaxGRESPerUser": "you already use as many GPUs as your QOS allows",
    "QOSMaxJobsPerUserLimit": "you already run as many jobs as your QOS allows",
    "QOSMaxNodePerUserLimit": "you already use as many nodes as your QOS allows",
    "QOSMaxCpuPerUserLimit": "you already use as many cores as your QOS allows",
    "QOSMaxMemoryPerUser": "you already use as much memory as your QOS allows",
    "AssocMaxJobsLimit": "your account already runs as many jobs as its limit allows",
    "AssocGrpGRES": "your account already uses as many GPUs as its limit allows",
    "AssocGrpNodeLimit": "your account already uses as many nodes as its limit allows",
    "AssocGrpCpuLimit": "your account already uses as many cores as its limit allows",
    "AssocGrpCPUMinutesLimit": "your account has used up its CPU time limit",
}
# Reasons that need a user or an administrator.
_HOPELESS = {
    "PartitionNodeLimit": "it requests more nodes than the partition has or allows",
    "PartitionTimeLimit": "it requests more time than the partition allows",
    "PartitionConfig": "it requests more than the partition allows (time, nodes or cores)",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node can satisfy the request",
    "InvalidAccount": "the account does not exist, or you are not allowed to use it",
    "InvalidQOS": "the QOS does not exist, or you are not allowed to use it",
    "DependencyNeverSatisfied": "the job that it depends on did not end as required",
    "JobHeldUser": "it is held by its owner; release it with: scontrol release JOB",
    "JobHeldAdmin": "it is held by an administrator",
    "QOSMaxWallDurationPerJobLimit": "it requests more time than your QOS allows",
    "QOSMaxGRESPerJob": "it requests more GPUs than your QOS allows for one job",
    "QOSMaxGRESPerNode": "it requests more GPUs per node than your QOS allows",
    "QOSMaxNodePerJobLimit": "it requests more nodes than your QOS allows for one job",
    "AssocMaxWallDurationPerJobLimit": "it requests more time than your account allows",
}
_FAILURES = {
    "OUT_OF_MEMORY": "it used more memory on a node than the job may use",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "its deadline passed",
    "TIMEOUT": "its time limit was reached",
    "NODE_FAIL": "a node failed",
    "PREEMPTED": "a job of higher priority preempted it",
}
# The step daemon exits with this "signal" if it cannot open the job's log (its folder is missing).
_NO_LOG = 53


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job. ``words`` is a sentence; ``slurm`` and ``reason`` are Slurm's codes."""

    job: str
    kind: Kind
    words: str
    slurm: str = ""
    reason: str = ""
    hopeless: bool = False  # pending for a reason that needs a user or an administrator
    nodes: str = ""
    restarts: int = 0
    exit_code: int | None = None
    signal: int | None = None
    log: Path | None = None

    @property
    def final(self) -> bool:
        """Whether the state will not change any more."""
        return self.kind in _FINAL


def poll_job(job: str, ask: Ask = require_slurm) -> JobState:
    """Return the state of a job. If Slurm does not answer, the state is ``unknown``."""
    answer = ask(["scontrol", "show", "job", job])
    if answer is not None and answer.code == 0 and "JobState=" in answer.out:
        return read_job_states(job, answer.out)
    said = answer.err if answer is not None else "scontrol is not installed on this host"
    if "Invalid job id" in said:
        words = f"Slurm does not know job {job}; it forgets jobs a few minutes after their end"
        return JobState(job=job, kind="gone", words=words)
    return JobState(job=job, kind="unknown", words=f"Slurm does not answer: {said or 'no output'}")


def read_job_states(job: str, text: str) -> JobState:
    """Parse the output of ``scontrol show job``.

    A job's name, folder and comment may contain any text, so a value is only read from a line that
    begins with one of Slurm's own keys.
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
            never = "will not start by itself" if state.hopeless else "is pending"
            expected = f"; expected start: {start}" if start and start[:1].isdigit() else ""
            return f"{again}{never}: {why_it_waits(state.reason, state.slurm)}{expected}"
        case "running":
            return f"is running{on}" + (f" (start {state.restarts + 1})" if state.restarts else "")
        case "completing":
            return f"is completing{on}"
        case "done":
            return f"finished{on}"
        case "failed":
            return f"failed{on}: {_why_it_failed(state)}"
        case "cancelled":
            return f"was cancelled{on}"
        case "timeout" | "node-fail" | "preempted":
            return f"was stopped{on}: {_FAILURES[state.slurm]}"
        case _:
            return f"is {state.slurm.lower()}{on}"


def _again(restarts: int) -> str:
    times = "once" if restarts == 1 else f"{restarts} times"
    return f"was requeued ({times} so far) and "


def _why_it_failed(state: JobState) -> str:
    if state.slurm in _FAILURES:
        return _FAILURES[state.slurm]
    if state.signal == _NO_LOG:
        return f"Slurm could not open its log {state.log} on the node; does its folder exist?"
    if state.signal:
        return f"killed by signal {state.signal}"
    return f"exit code {state.exit_code}"


def why_it_waits(reason: str, slurm: str = "PENDING") -> str:
    """Describe why a job is pending, followed by Slurm's reason code."""
    if slurm == "CONFIGURING":
        return "its nodes are booting"
    word = _reason_word(reason)
    plain = _HOPELESS.get(word) or _REASONS.get(word)
    return f"{plain} ({word})" if plain else f"Slurm gives the reason {reason or 'None'}"


def _reason_word(reason: str) -> str:
    """Return the reason code before the comma: ``ReqNodeNotAvail,_UnavailableNodes:n[1-2]``."""
    return reason.partition(",")[0] or "None"


def _value(text: str, line: str, key: str) -> str | None:
    """Return ``key=…`` from the line that begins with ``line=``."""
    found = re.search(rf"^ +(?={line}=)(?:.* )?{key}=(\S*)", text, re.MULTILINE)
    return found[1] if found else None
