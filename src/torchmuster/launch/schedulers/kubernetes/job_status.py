"""The state of a job's pods, and what is wrong with them: pure functions of objects of the API."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from torchmuster.errors import ExitCode
from torchmuster.finding import Finding, Status
from torchmuster.launch.schedulers.kubernetes.cluster import Cluster
from torchmuster.launch.schedulers.kubernetes.cluster_jobs import ClusterJob, join_secret
from torchmuster.launch.schedulers.kubernetes.manifests import Document
from torchmuster.redaction import harmless
from torchmuster.units import plural

CONTAINER = "node"
_INDEX = "batch.kubernetes.io/job-completion-index"
_LONGEST_MESSAGE = 300

EXIT_CODES_OF_PODS = {
    int(ExitCode.GOOD): "finished",
    int(ExitCode.FAILED): "failed",
    int(ExitCode.IMPOSSIBLE): "wrong usage or settings",
    int(ExitCode.NOT_NOW): "a resource is in use",
    int(ExitCode.SAVED): "saved after a stop request; the Job starts it again",
    126: "the image's command cannot be executed",
    127: "the image does not have the command",
    int(ExitCode.KILLED): "killed by SIGKILL",
    139: "crashed: segmentation fault",
    int(ExitCode.TERMINATED): "stopped by SIGTERM",
}


@dataclass(frozen=True, kw_only=True)
class PodState:
    """The newest pod of a node rank. ``reason`` is one word of Kubernetes, ``message`` its text."""

    node: int
    pod: str = ""  # empty: there is no pod
    phase: str = ""
    ready: bool = False
    restarts: int = 0  # of its container
    replacements: int = 0  # earlier pods of this node rank
    host: str = ""
    age_s: float | None = None
    reason: str = ""
    message: str = ""
    exit_code: int | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether there is nothing to report about it."""
        return not self.reason and self.phase in ("Running", "Succeeded")

    def as_json(self) -> dict[str, object]:
        """Return it as plain JSON types."""
        return {**vars(self), "pod": self.pod or None, "phase": self.phase or None}


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """A job, its pods by node rank, and what is wrong."""

    job: ClusterJob
    pods: tuple[PodState, ...]
    findings: tuple[Finding, ...]

    @property
    def state(self) -> str:
        """The job's state; an active job is running or pending."""
        if self.job.state != "active":
            return self.job.state
        return "running" if any(one.phase == "Running" for one in self.pods) else "pending"

    @property
    def phases(self) -> dict[str, int]:
        """How many pods are in each phase."""
        return dict(Counter(one.phase or "missing" for one in self.pods))


def job_status(
    job: ClusterJob,
    pods: Sequence[Document],
    events: Sequence[Document],
    *,
    now: datetime,
    cluster: Cluster,
) -> JobStatus:
    """Return the status of a job from its pods and the warning events of its namespace."""
    warnings = _last_warnings(events)
    states = tuple(_pod_states(job, pods, warnings, now))
    findings = tuple(_findings(job, states, warnings, cluster))
    return JobStatus(job=job, pods=states, findings=findings)


def newest_pods(pods: Iterable[Document]) -> dict[int, list[Document]]:
    """Return the pods of each node rank, the newest last."""
    found: dict[int, list[Document]] = {}
    for pod in sorted(pods, key=lambda one: str(one["metadata"].get("creationTimestamp") or "")):
        index = {**_metadata_of(pod, "labels"), **_metadata_of(pod, "annotations")}.get(_INDEX, "")
        if index.isdecimal():
            found.setdefault(int(index), []).append(pod)
    return found


def _metadata_of(pod: Document, part: str) -> Mapping[str, str]:
    return pod["metadata"].get(part) or {}


def _pod_states(
    job: ClusterJob, pods: Sequence[Document], warnings: Mapping[str, str], now: datetime
) -> Iterator[PodState]:
    by_node = newest_pods(pods)
    for node in range(max(job.nodes, *(index + 1 for index in by_node), 1)):
        if node not in by_node:
            yield PodState(node=node)
            continue
        *earlier, newest = by_node[node]
        yield pod_state(newest, node, len(earlier), warnings, now)


def pod_state(
    pod: Document, node: int, replacements: int, warnings: Mapping[str, str], now: datetime
) -> PodState:
    """Return the state of one pod."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    container = _container(status)
    began = _time(metadata.get("creationTimestamp"))
    phase = str(status.get("phase") or "Unknown")
    if metadata.get("deletionTimestamp") and phase in ("Running", "Pending"):
        phase = "Terminating"
    ended = _terminated(status)
    reason, message = _reason(phase, status, warnings.get(metadata["name"], ""))
    return PodState(
        node=node,
        pod=harmless(str(metadata["name"])),
        phase=harmless(phase),
        ready=bool(container.get("ready")),
        restarts=int(container.get("restartCount") or 0),
        replacements=replacements,
        host=harmless(str((pod.get("spec") or {}).get("nodeName") or "")),
        age_s=None if began is None else max(0.0, (now - began).total_seconds()),
        reason=harmless(reason),
        message=_short(message),
        exit_code=ended.get("exitCode"),
    )


def _container(status: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = status.get("containerStatuses") or []
    return next((one for one in containers if one.get("name") == CONTAINER), {})


def _terminated(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return (_container(status).get("state") or {}).get("terminated") or {}


def _reason(phase: str, status: Mapping[str, Any], warning: str) -> tuple[str, str]:
    """Return why a pod is not running, and the text of Kubernetes about it."""
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    taken = conditions.get("DisruptionTarget") or {}
    if phase == "Failed":
        if status.get("reason"):  # Evicted, NodeLost, Preempting …
            return status["reason"], status.get("message") or ""
        ended = _terminated(status)
        if ended.get("reason") == "OOMKilled":
            return "OOMKilled", "the container used more memory than its limit"
        if taken.get("status") == "True":
            return taken.get("reason") or "DisruptionTarget", taken.get("message") or ""
        code = ended.get("exitCode")
        if code is not None:
            return f"exit code {code}", ended.get("message") or ""
        return "Failed", status.get("message") or ""
    if phase == "Pending":
        scheduled = conditions.get("PodScheduled") or {}
        if scheduled.get("status") == "False":
            message = scheduled.get("message") or warning
            return scheduled.get("reason") or "Unschedulable", message
        waiting = (_container(status).get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason") or "ContainerCreating"
        return reason, waiting.get("message") or warning
    return "", ""


def _short(text: str) -> str:
    line = " ".join(harmless(text).split())
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}…"


def _last_warnings(events: Sequence[Document]) -> dict[str, str]:
    """Return the newest warning about each object, by its name."""
    found: dict[str, tuple[str, str]] = {}
    for event in events:
        about = str((event.get("involvedObject") or {}).get("name") or "")
        series = (event.get("series") or {}).get("lastObservedTime")
        metadata = event.get("metadata") or {}
        times = (
            series,
            event.get("lastTimestamp"),
            event.get("eventTime"),
            metadata.get("creationTimestamp"),
        )
        when = next((str(one) for one in times if one), "")
        text = f"{event.get('reason') or ''}: {event.get('message') or ''}"
        if when >= found.get(about, ("", ""))[0]:
            found[about] = (when, _short(text))
    return {name: text for name, (_, text) in found.items()}


def _time(text: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


# ---- what is wrong


def _findings(
    job: ClusterJob,
    pods: Sequence[PodState],
    warnings: Mapping[str, str],
    cluster: Cluster,
) -> Iterator[Finding]:
    if job.state == "stopped":
        fix = job.command or "the same muster kubernetes apply command"
        yield Finding(
            name="job-stopped",
            status=Status.NOTE,
            what=f"{job.named} was stopped with muster kubernetes stop",
            fix=f"{fix}  # resumes it",
        )
        return
    if job.state == "suspended":
        yield Finding(
            name="job-suspended",
            status=Status.NOTE,
            what=f"{job.named} is suspended, but not by Muster",
            why="a queue such as Kueue suspends jobs until it admits them",
            fix=cluster.kubectl(f"describe {job.named}"),
        )
        return
    if job.state == "failed":
        yield Finding(
            name="job-failed",
            status=Status.FAILURE,
            what=f"{job.named} has failed",
            why=job.reason,
            fix=f"{cluster.muster('logs', job.name)}  # the launcher's output names the cause",
        )
    missing = [one for one in pods if not one.pod]
    if missing and job.state == "active":
        child = job.pod_labels["batch.kubernetes.io/job-name"]
        yield Finding(
            name="no-pod",
            status=Status.WARNING,
            what=f"there is no pod for {_nodes(missing)}",
            why=warnings.get(job.name)
            or warnings.get(child)
            or "its controller has not created it yet",
            fix=cluster.kubectl(f"describe {job.named}"),
        )
    for reason in dict.fromkeys(one.reason for one in pods if one.reason):
        same = [one for one in pods if one.reason == reason]
        if finding := _pod_finding(job, reason, same, cluster):
            yield finding


def _pod_finding(
    job: ClusterJob, reason: str, pods: Sequence[PodState], cluster: Cluster
) -> Finding | None:
    """Return what a reason means and how to fix it; None if nothing is wrong."""
    first = pods[0]
    again = f"{cluster.muster('stop', job.name, '--delete')}  # then apply again with "
    describe = cluster.kubectl(f"describe pod {first.pod}")
    logs = cluster.muster("logs", job.name, f"--node {first.node}")
    if reason in ("Unschedulable", "SchedulingGated"):
        resource = re.search(r"Insufficient ([\w./-]+)", first.message)
        what = f"no Kubernetes node can take {_pods(pods)}"
        fix = (
            f"{again}less per pod, or wait; what nodes have: kubectl describe nodes"
            if resource
            else describe
        )
        return Finding(
            name="pod-unschedulable", status=Status.WARNING, what=what, why=first.message, fix=fix
        )
    if reason in ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"):
        fix = f"{again}the right --image; a private registry needs: kubectl create secret docker-registry …"
        what = f"cannot pull the image of {_pods(pods)}"
        return Finding(
            name="image-pull", status=Status.FAILURE, what=what, why=first.message, fix=fix
        )
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        what = f"cannot create the container of {_pods(pods)}"
        lost = f'secret "{join_secret(job.name)}" not found' in first.message and job.command
        fix = f"{job.command}  # creates the Secret" if lost else describe
        return Finding(
            name="container-create", status=Status.FAILURE, what=what, why=first.message, fix=fix
        )
    if reason == "ContainerCreating":
        if not first.message:
            return None  # it is starting
        what = f"{_pods(pods)}: starting is delayed"
        return Finding(
            name="pod-starting", status=Status.WARNING, what=what, why=first.message, fix=describe
        )
    if reason == "OOMKilled":
        what = f"out of memory: {_pods(pods)}"
        fix = f"{again}more --memory"
        return Finding(
            name="oom-killed", status=Status.FAILURE, what=what, why=first.message, fix=fix
        )
    if reason.startswith("exit code "):
        code = first.exit_code
        if code in (ExitCode.GOOD, ExitCode.SAVED) or job.state == "finished":
            return None
        meaning = EXIT_CODES_OF_PODS.get(code or 0, "")
        what = f"{_pods(pods)}: {reason}" + (f" ({meaning})" if meaning else "")
        if code in (126, 127):
            fix = f"{again}an --image in which torchmuster is installed"
            return Finding(
                name="no-command", status=Status.FAILURE, what=what, why=first.message, fix=fix
            )
        return Finding(
            name="pod-failed", status=Status.FAILURE, what=what, why=first.message, fix=logs
        )
    what = f"{_pods(pods)}: {reason}"
    if job.state != "active":
        return Finding(name="pod-lost", status=Status.NOTE, what=what, why=first.message, fix=logs)
    follow = f"{cluster.muster('status', job.name)}  # the Job creates another pod"
    return Finding(name="pod-lost", status=Status.WARNING, what=what, why=first.message, fix=follow)


def _pods(pods: Sequence[PodState]) -> str:
    return (
        f"pod {pods[0].pod}" if len(pods) == 1 else f"{plural(len(pods), 'pod')} ({_nodes(pods)})"
    )


def _nodes(pods: Sequence[PodState]) -> str:
    shown = ", ".join(str(one.node) for one in pods[:5]) + (", …" if len(pods) > 5 else "")
    return f"node {shown}" if len(pods) == 1 else f"nodes {shown}"
