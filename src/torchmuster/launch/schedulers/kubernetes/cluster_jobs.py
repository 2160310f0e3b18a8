"""Jobs in a cluster: find, create, resume, suspend and delete them."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from torchmuster.errors import Impossible, NotNow
from torchmuster.launch.schedulers.kubernetes.cluster import (
    EVENT,
    JOB,
    JOB_RESOURCES,
    JOBSET,
    POD,
    SECRET,
    SERVICE,
    Cluster,
    Refused,
    Resource,
    nearest,
    resource_of,
)
from torchmuster.launch.schedulers.kubernetes.manifests import MANAGED_BY, SECRET_KEY, Document
from torchmuster.redaction import harmless

# Annotations of a job: when stop suspended it, and the command that applied it.
STOPPED = "torchmuster/stopped"
COMMAND = "torchmuster/command"

JobState = Literal["active", "finished", "failed", "stopped", "suspended", "deleting"]
_FINISHED = {"Complete", "Completed", "SuccessCriteriaMet"}
_FAILED = {"Failed", "FailureTarget"}


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A Job, JobSet or TrainJob as the API server describes it."""

    resource: Resource
    document: Document

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.document["metadata"]["name"])

    @property
    def named(self) -> str:
        """Its name with its type, as kubectl writes it."""
        return self.resource.named(self.name)

    @property
    def command(self) -> str:
        """The command that applied it; empty if it was applied with kubectl."""
        return harmless(self._annotations.get(COMMAND, ""))

    @property
    def nodes(self) -> int:
        """The number of pods that it runs."""
        spec = self.document["spec"]
        if self.resource is JOB:
            return int(spec.get("completions") or 1)
        if self.resource is JOBSET:
            return int(spec["replicatedJobs"][0]["template"]["spec"].get("completions") or 1)
        return int((spec.get("trainer") or {}).get("numNodes") or 1)

    @property
    def keeps_runs(self) -> bool:
        """Whether its run folder is on a volume, not in its pods."""
        return '"persistentVolumeClaim"' in json.dumps(self.document["spec"])

    @property
    def pod_labels(self) -> dict[str, str]:
        """The label that the Job controller gives to its pods."""
        # JobSet names the Job NAME-node-0; Kubeflow Trainer creates such a JobSet.
        job = self.name if self.resource is JOB else f"{self.name}-node-0"
        return {"batch.kubernetes.io/job-name": job}

    @property
    def state(self) -> JobState:
        """What its controller reports."""
        if self.document["metadata"].get("deletionTimestamp"):
            return "deleting"
        types = {one["type"] for one in self._conditions}
        if types & _FINISHED:
            return "finished"
        if types & _FAILED:
            return "failed"
        if self.document["spec"].get("suspend"):
            return "stopped" if STOPPED in self._annotations else "suspended"
        return "active"

    @property
    def reason(self) -> str:
        """Why it failed, from its condition."""
        for condition in self._conditions:
            if condition["type"] in _FAILED:
                parts = (condition.get("reason") or "", condition.get("message") or "")
                return harmless(": ".join(part for part in parts if part))
        return ""

    @property
    def _annotations(self) -> Mapping[str, str]:
        return self.document["metadata"].get("annotations") or {}

    @property
    def _conditions(self) -> list[dict[str, Any]]:
        conditions = (self.document.get("status") or {}).get("conditions") or []
        return [one for one in conditions if one.get("status") == "True"]


def find_job(cluster: Cluster, name: str) -> ClusterJob:
    """Return the job of this name that Muster rendered; of which kind it is, the cluster knows."""
    known: list[str] = []
    refusals: list[tuple[Refused, Resource]] = []
    for resource in JOB_RESOURCES:
        try:
            documents = cluster.list_all(resource, labels=MANAGED_BY)
        except Refused as refused:
            if refused.is_unknown_type:
                continue
            if not refused.is_permission:
                raise cluster.error(refused, "list", resource) from None
            refusals.append((refused, resource))
            continue
        for document in documents:
            if document["metadata"]["name"] == name:
                return ClusterJob(resource=resource, document=document)
            known.append(str(document["metadata"]["name"]))
    if refusals and not known:
        raise cluster.error(refusals[0][0], "list", refusals[0][1])
    unlisted = ", ".join(resource.plural for _, resource in refusals)
    raise Impossible(
        f"there is no job {harmless(name)!r} of Muster in namespace {cluster.namespace}",
        why=(f"its jobs are: {', '.join(sorted(known)[:10])}" if known else "it has none")
        + (f"; you may not list {unlisted}" if unlisted else ""),
        fix=cluster.muster("status", nearest(name, known))
        if known
        else "--namespace NAME or --context NAME, or create it: muster kubernetes apply …",
    )


def pods_of(cluster: Cluster, job: ClusterJob) -> list[Document]:
    """Return the pods of a job, also those that have been replaced."""
    try:
        return cluster.list_all(POD, labels=job.pod_labels)
    except Refused as refused:
        raise cluster.error(refused, "list", POD) from None


def warnings_in(cluster: Cluster) -> list[Document] | None:
    """Return the warning events of the namespace; None without the permission to list them."""
    try:
        return cluster.list_all(EVENT, fields="type=Warning")
    except Refused as refused:
        if refused.is_permission:
            return None
        raise cluster.error(refused, "list", EVENT) from None


def apply_job(
    cluster: Cluster, documents: Sequence[Document], command: str
) -> list[tuple[str, str]]:
    """Create the objects of a job and the Secret with which its pods join, or resume the job.

    Returns each object with what was done.
    """
    *others, job = documents
    name, resource = job["metadata"]["name"], resource_of(job)
    before = {one["kind"]: _existing(cluster, one) for one in documents}
    _check_kind(cluster, name, resource)
    found = before[job["kind"]]
    state = ClusterJob(resource=resource, document=found).state if found else None
    if state == "deleting":
        raise NotNow(
            f"{resource.named(name)} is being deleted",
            why="its pods save and exit first",
            fix=f"{cluster.muster('status', name)}  # until it is gone; then apply again",
        )
    if state in ("finished", "failed"):
        raise Impossible(
            f"{resource.named(name)} has already {state}",
            why="Kubernetes does not start a job again that is over",
            fix=f"{cluster.muster('stop', name, '--delete')}  # then apply again, or apply with another --name",
        )
    labels = job["metadata"]["labels"]
    done = [_create_secret(cluster, name, labels)]
    annotated = {**job, "metadata": {**job["metadata"], "annotations": {COMMAND: command}}}
    for document in (*others, annotated):
        result = cluster.apply(document)
        earlier = before[document["kind"]]
        outcome = "created"
        if earlier is not None:
            versions = [one["metadata"].get("resourceVersion") for one in (earlier, result)]
            outcome = "unchanged" if versions[0] == versions[1] else "configured"
        done.append((resource_of(document).named(document["metadata"]["name"]), outcome))
    if state == "stopped":
        change = {"metadata": {"annotations": {STOPPED: None}}, "spec": {"suspend": False}}
        cluster.change(resource, name, change)
        done[-1] = (resource.named(name), "resumed")
    elif state == "suspended":
        done[-1] = (resource.named(name), "suspended by another program, such as a queue")
    return done


def _existing(cluster: Cluster, document: Document) -> Document | None:
    resource, name = resource_of(document), document["metadata"]["name"]
    found = cluster.find(resource, name)
    if found and not MANAGED_BY.items() <= (found["metadata"].get("labels") or {}).items():
        raise Impossible(
            f"{resource.named(name)} exists in namespace {cluster.namespace}, and is not Muster's",
            why="it does not have the label app.kubernetes.io/managed-by=torchmuster",
            fix="apply with another --name",
        )
    return found


def _check_kind(cluster: Cluster, name: str, resource: Resource) -> None:
    """Raise if a job of another kind has the name: the names of its pods would be the same."""
    for other in JOB_RESOURCES:
        if other is resource:
            continue
        try:
            documents = cluster.list_all(other, labels=MANAGED_BY)
        except Refused as refused:
            if refused.is_unknown_type or refused.is_permission:
                continue
            raise cluster.error(refused, "list", other) from None
        if any(one["metadata"]["name"] == name for one in documents):
            raise Impossible(
                f"{other.named(name)} exists in namespace {cluster.namespace}",
                why="jobs of different kinds with one name would share the names of their pods",
                fix=f"{cluster.muster('stop', name, '--delete')}  # or apply with another --name",
            )


def _create_secret(cluster: Cluster, name: str, labels: Mapping[str, str]) -> tuple[str, str]:
    """Create the Secret with which the pods join the launcher, unless it exists."""
    document = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": join_secret(name), "labels": dict(labels)},
        "type": "Opaque",
        "stringData": {SECRET_KEY: secrets.token_urlsafe(32)},
    }
    created = cluster.create(SECRET, document)
    return SECRET.named(join_secret(name)), "created" if created else "exists"


def join_secret(name: str) -> str:
    """Return the name of the Secret with which the pods of a job join its launcher."""
    return f"{name}-join"


def suspend_job(cluster: Cluster, job: ClusterJob) -> None:
    """Suspend a job: its pods get SIGTERM and save; apply resumes it."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    change = {"metadata": {"annotations": {STOPPED: now}}, "spec": {"suspend": True}}
    cluster.change(job.resource, job.name, change)


def delete_job(cluster: Cluster, job: ClusterJob) -> list[str]:
    """Delete a job, its pods, its Service and its Secret; return what was deleted."""
    deleted = [job.named] if cluster.delete(job.resource, job.name) else []
    # JobSet and Kubeflow Trainer delete the Service that they have created.
    rest = [
        (SECRET, join_secret(job.name)),
        *([(SERVICE, job.name)] if job.resource is JOB else []),
    ]
    return deleted + [
        resource.named(name) for resource, name in rest if cluster.delete(resource, name)
    ]
