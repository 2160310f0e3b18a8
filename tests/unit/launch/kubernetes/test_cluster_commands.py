"""``muster kubernetes apply``, ``status``, ``logs`` and ``stop`` with the real client and a stub API server."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from torchmuster.cli import kubernetes_jobs, output
from torchmuster.cli.main import main
from torchmuster.launch.schedulers.kubernetes import cluster as cluster_module
from unit.launch.kubernetes.stub_api_server import TOKEN, Document, StubCluster, stub_api_server

APPLY = ("apply", "--image", "registry/train:1", "--nodes", "2", "--name", "train", "train.py")
OURS = {"app.kubernetes.io/managed-by": "torchmuster", "app.kubernetes.io/name": "train"}
KINDS = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}--- stderr\n{self.err}"


Kubernetes = Callable[..., Result]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubCluster]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with stub_api_server() as stub:
        write_kubeconfig(tmp_path / "kubeconfig", stub.server)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield stub


def write_kubeconfig(path: Path, server: str, user: Document | None = None) -> None:
    contexts = [
        {"name": "lab", "context": {"cluster": "lab", "user": "ana"}},
        {"name": "team", "context": {"cluster": "lab", "user": "ana", "namespace": "research"}},
    ]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "contexts": contexts,
        "clusters": [{"name": "lab", "cluster": {"server": server}}],
        "users": [{"name": "ana", "user": user or {"token": TOKEN}}],
    }
    path.write_text(yaml.safe_dump(config))


@pytest.fixture
def kubernetes(cluster: StubCluster, capsys: pytest.CaptureFixture[str]) -> Kubernetes:
    """Run the command in this process: the client takes seconds to import."""

    def run(*words: str) -> Result:
        code = main(["kubernetes", *words])
        shown = capsys.readouterr()
        return Result(
            code, *(text.replace(cluster.server, "SERVER") for text in (shown.out, shown.err))
        )

    return run


def pod(
    node: int, *, name: str = "", phase: str = "Running", age_s: int = 300, **status: Any
) -> Document:
    """Return a pod as the Job controller and the kubelet describe it."""
    began = datetime.now(UTC) - timedelta(seconds=age_s)
    state = {"Running": {"running": {}}, "Succeeded": {"terminated": {"exitCode": 0}}}.get(
        phase, {}
    )
    container = {"name": "node", "ready": phase == "Running", "restartCount": 0, "state": state}
    index = {"batch.kubernetes.io/job-completion-index": str(node)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name or f"train-{node}-x{node}",
            "labels": {**OURS, **index, "batch.kubernetes.io/job-name": "train"},
            "annotations": index,
            "creationTimestamp": began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        },
        "spec": {"nodeName": f"gpu-{node}"} if phase != "Pending" else {},
        "status": {"phase": phase, "containerStatuses": [container], **status},
    }


def ended(node: int, code: int, *, reason: str = "Error", **more: Any) -> Document:
    state = {"terminated": {"exitCode": code, "reason": reason}}
    container = {"name": "node", "ready": False, "restartCount": 0, "state": state}
    return pod(node, phase="Failed", containerStatuses=[container], **more)


def waiting(node: int, reason: str, message: str = "") -> Document:
    state = {"waiting": {"reason": reason, "message": message}}
    container = {"name": "node", "ready": False, "restartCount": 0, "state": state}
    return pod(node, phase="Pending", containerStatuses=[container])


def unschedulable(node: int, message: str) -> Document:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return pod(node, phase="Pending", conditions=[{**condition, "message": message}])


def warning(about: str, reason: str, message: str, when: str = "2026-11-18T12:00:00Z") -> Document:
    return {
        "kind": "Event",
        "metadata": {"name": f"{about}.{reason}"},
        "type": "Warning",
        "involvedObject": {"name": about},
        "reason": reason,
        "message": message,
        "lastTimestamp": when,
    }


def set_condition(cluster: StubCluster, kind: str, condition: str, **more: str) -> None:
    document = cluster.get(kind, "train")
    document.setdefault("status", {})["conditions"] = [
        {"type": condition, "status": "True", **more}
    ]


# ---- apply


@pytest.mark.parametrize("kind", KINDS)
def test_apply_creates_the_objects(
    kubernetes: Kubernetes, cluster: StubCluster, kind: str, snapshot: SnapshotAssertion
) -> None:
    result = kubernetes(APPLY[0], "--kind", kind, *APPLY[1:])
    assert result.code == 0
    assert result.text == snapshot
    stored = {(kind, name) for _, kind, name in cluster.objects}
    service = {("Service", "train")} if kind == "job" else set()
    assert stored == {("Secret", "train-join"), (KINDS[kind], "train"), *service}
    secret = cluster.get("Secret", "train-join")
    assert secret["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "torchmuster"
    assert len(secret["stringData"]["secret"]) >= 32
    assert secret["stringData"]["secret"] not in result.text


def test_apply_again_changes_nothing(kubernetes: Kubernetes, cluster: StubCluster) -> None:
    kubernetes(*APPLY)
    secret = cluster.get("Secret", "train-join")["stringData"]["secret"]
    result = kubernetes(*APPLY)
    assert (result.code, result.out.splitlines()) == (
        0,
        ["secret/train-join exists", "service/train unchanged", "job.batch/train unchanged"],
    )
    assert cluster.get("Secret", "train-join")["stringData"]["secret"] == secret


def test_apply_names_the_context_and_namespace_in_its_hints(
    kubernetes: Kubernetes, cluster: StubCluster
) -> None:
    result = kubernetes(APPLY[0], "--context", "team", "--namespace", "research", *APPLY[1:])
    assert result.code == 0
    assert ("research", "Job", "train") in cluster.objects
    hints = [line for line in result.err.splitlines() if "muster kubernetes" in line]
    assert all("train --context team --namespace research" in line for line in hints)
    assert len(hints) == 3


def test_the_namespace_is_that_of_the_context(kubernetes: Kubernetes, cluster: StubCluster) -> None:
    assert kubernetes(APPLY[0], "--context", "team", *APPLY[1:]).code == 0
    assert {namespace for namespace, _, _ in cluster.objects} == {"research"}


@pytest.mark.parametrize("kind", KINDS)
def test_stop_suspends_and_apply_resumes(
    kubernetes: Kubernetes, cluster: StubCluster, kind: str, snapshot: SnapshotAssertion
) -> None:
    words = (APPLY[0], "--kind", kind, *APPLY[1:])
    kubernetes(*words)
    stopped = kubernetes("stop", "train")
    assert stopped.text == snapshot(name="stop")
    assert cluster.get(KINDS[kind], "train")["spec"]["suspend"] is True
    status = kubernetes("status", "train")
    assert status.code == 0
    assert status.text == snapshot(name="status")
    resumed = kubernetes(*words)
    assert resumed.out.splitlines()[-1].endswith("/train resumed")
    document = cluster.get(KINDS[kind], "train")
    assert document["spec"]["suspend"] is False
    assert list(document["metadata"]["annotations"]) == ["torchmuster/command"]


def test_a_job_that_a_queue_suspended_is_not_resumed(
    kubernetes: Kubernetes, cluster: StubCluster, snapshot: SnapshotAssertion
) -> None:
    kubernetes(*APPLY)
    cluster.get("Job", "train")["spec"]["suspend"] = True
    assert kubernetes(*APPLY).text == snapshot(name="apply")
    assert cluster.get("Job", "train")["spec"]["suspend"] is True
    assert kubernetes("status", "train").text == snapshot(name="status")


def test_the_command_to_resume_is_the_one_that_was_typed(
    kubernetes: Kubernetes, cluster: StubCluster
) -> None:
    kubernetes(*APPLY, "--lr", "1e-4")
    typed = cluster.get("Job", "train")["metadata"]["annotations"]["torchmuster/command"]
    assert typed == "muster kubernetes " + " ".join([*APPLY[:-1], "--", "train.py", "--lr", "1e-4"])
    assert kubernetes(*typed.split()[2:]).out.splitlines()[-1] == "job.batch/train unchanged"


def test_a_job_with_other_settings_is_not_changed(
    kubernetes: Kubernetes, snapshot: SnapshotAssertion
) -> None:
    kubernetes(*APPLY)
    result = kubernetes(*APPLY, "--lr", "1e-4")
    assert result.code == 2
    assert result.text == snapshot


@pytest.mark.parametrize(
    ("condition", "more"), [("Complete", {}), ("Failed", {"reason": "PodFailurePolicy"})]
)
def test_a_job_that_is_over_is_not_applied(
    kubernetes: Kubernetes,
    cluster: StubCluster,
    condition: str,
    more: dict[str, str],
    snapshot: SnapshotAssertion,
) -> None:
    kubernetes(*APPLY)
    set_condition(cluster, "Job", condition, **more)
    result = kubernetes(*APPLY)
    assert result.code == 2
    assert result.text == snapshot


def test_a_job_that_is_being_deleted(kubernetes: Kubernetes, snapshot: SnapshotAssertion) -> None:
    kubernetes(*APPLY)
    kubernetes("stop", "train", "--delete")
    result = kubernetes(*APPLY)
    assert result.code == 3
    assert result.text == snapshot


def test_a_name_of_another_kind_or_owner(
    kubernetes: Kubernetes, cluster: StubCluster, snapshot: SnapshotAssertion
) -> None:
    kubernetes(*APPLY)
    result = kubernetes(APPLY[0], "--kind", "jobset", *APPLY[1:])
    assert result.code == 2
    assert result.text == snapshot(name="kind")
    cluster.objects.clear()
    cluster.put({"kind": "Service", "metadata": {"name": "train"}, "spec": {}})
    result = kubernetes(*APPLY)
    assert result.code == 2
    assert result.text == snapshot(name="owner")
    assert list(cluster.objects) == [("default", "Service", "train")]


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_kind_that_is_not_installed(
    kubernetes: Kubernetes, cluster: StubCluster, kind: str, snapshot: SnapshotAssertion
) -> None:
    cluster.installed -= {"JobSet", "TrainJob"}
    result = kubernetes(APPLY[0], "--kind", kind, *APPLY[1:])
    assert result.code == 2
    assert result.text == snapshot
    assert not cluster.objects
    assert kubernetes(*APPLY).code == 0


# ---- status

POD_CASES: dict[str, tuple[list[Document], list[Document], list[str], int]] = {
    # pods, events, names of findings, exit code
    "healthy": ([pod(0), pod(1)], [], [], 0),
    "starting": ([pod(0), waiting(1, "ContainerCreating")], [], [], 0),
    "unschedulable": (
        [
            unschedulable(0, "0/12 nodes are available: 12 Insufficient nvidia.com/gpu."),
            unschedulable(1, "0/12 nodes are available: 12 Insufficient nvidia.com/gpu."),
        ],
        [],
        ["pod-unschedulable"],
        0,
    ),
    "the scheduler's message is in an event": (
        [pod(0), unschedulable(1, "")],
        [
            warning("train-1-x1", "FailedScheduling", "an older one", "2026-11-18T11:00:00Z"),
            warning(
                "train-1-x1", "FailedScheduling", "0/3 nodes are available: 3 node(s) had taints"
            ),
            warning("other-pod", "FailedScheduling", "about another pod"),
        ],
        ["pod-unschedulable"],
        0,
    ),
    "a volume that cannot be mounted": (
        [pod(0), waiting(1, "ContainerCreating")],
        [warning("train-1-x1", "FailedMount", 'persistentvolumeclaim "runs" not found')],
        ["pod-starting"],
        0,
    ),
    "image": (
        [
            waiting(0, "ImagePullBackOff", 'Back-off pulling image "registry/train:1"'),
            waiting(1, "ErrImagePull", "manifest unknown"),
        ],
        [],
        ["image-pull", "image-pull"],
        1,
    ),
    "secret": (
        [pod(0), waiting(1, "CreateContainerConfigError", 'secret "train-join" not found')],
        [],
        ["container-create"],
        1,
    ),
    "oom": ([pod(0), ended(1, 137, reason="OOMKilled")], [], ["oom-killed"], 1),
    "evicted": (
        [
            pod(0),
            pod(
                1,
                phase="Failed",
                reason="Evicted",
                message="The node was low on resource: ephemeral-storage.",
            ),
        ],
        [],
        ["pod-lost"],
        0,
    ),
    "preempted": (
        [
            pod(0),
            ended(
                1,
                143,
                conditions=[
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "PreemptionByScheduler",
                        "message": "default-scheduler: preempting to accommodate a higher priority pod",
                    }
                ],
            ),
        ],
        [],
        ["pod-lost"],
        0,
    ),
    "failed": ([ended(0, 1), ended(1, 1)], [], ["pod-failed"], 1),
    "no muster in the image": ([ended(0, 127), ended(1, 127)], [], ["no-command"], 1),
    "saved": ([pod(0), ended(1, 75)], [], [], 0),
    "replaced": (
        [pod(0), ended(1, 75, name="train-1-old", age_s=900), pod(1, age_s=60)],
        [],
        [],
        0,
    ),
    "no pods": (
        [],
        [
            warning(
                "train", "FailedCreate", "exceeded quota: gpus, requested: 16, used: 0, limited: 8"
            )
        ],
        ["no-pod"],
        0,
    ),
    "terminal codes": (
        [pod(0), waiting(1, "ImagePullBackOff", "\x1b]0;title\x07 red \x1b[31m")],
        [],
        ["image-pull"],
        1,
    ),
}


MADE = datetime.now(UTC)


def as_of_now(document: Document) -> Document:
    """Return a pod of a case as old as the case says: the cases were made when the tests were collected."""
    metadata = dict(document["metadata"])
    if made := metadata.get("creationTimestamp"):
        began = datetime.fromisoformat(made) + (datetime.now(UTC) - MADE)
        metadata["creationTimestamp"] = began.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {**document, "metadata": metadata}


@pytest.mark.parametrize("case", POD_CASES)
def test_status(
    kubernetes: Kubernetes, cluster: StubCluster, case: str, snapshot: SnapshotAssertion
) -> None:
    pods, events, names, code = POD_CASES[case]
    kubernetes(*APPLY)
    for number, document in enumerate([*pods, *events]):
        if document["kind"] == "Event":
            document["metadata"]["name"] += f".{number}"
        cluster.put(as_of_now(document) if document["kind"] == "Pod" else document)
    result = kubernetes("status", "train")
    assert result.code == code
    assert result.text == snapshot
    assert "\x1b" not in result.text
    found = json.loads(kubernetes("status", "train", "--json").out)["findings"]
    assert [one["name"] for one in found] == names


@pytest.mark.parametrize("kind", KINDS)
def test_status_of_each_kind_as_json(
    kubernetes: Kubernetes, cluster: StubCluster, kind: str
) -> None:
    kubernetes(APPLY[0], "--kind", kind, *APPLY[1:])
    for node in (0, 1):
        document = pod(node)
        job = "train" if kind == "job" else "train-node-0"
        document["metadata"]["labels"]["batch.kubernetes.io/job-name"] = job
        cluster.put(document)
    status = json.loads(kubernetes("status", "train", "--json").out)
    assert (status["kind"], status["state"], status["nodes"]) == (KINDS[kind], "running", 2)
    assert [(one["node"], one["pod"], one["host"]) for one in status["pods"]] == [
        (0, "train-0-x0", "gpu-0"),
        (1, "train-1-x1", "gpu-1"),
    ]
    assert [one["ready"] for one in status["pods"]] == [True, True]
    assert status["findings"] == []


def test_status_counts_replacements(kubernetes: Kubernetes, cluster: StubCluster) -> None:
    kubernetes(*APPLY)
    for age_s in (900, 600):
        cluster.put(ended(1, 75, name=f"train-1-old{age_s}", age_s=age_s))
    cluster.put(pod(1))
    second = json.loads(kubernetes("status", "train", "--json").out)["pods"][1]
    assert (second["pod"], second["replacements"]) == ("train-1-x1", 2)


@pytest.mark.parametrize(
    ("kind", "condition", "state", "code"),
    [
        ("job", "Complete", "finished", 0),
        ("job", "Failed", "failed", 1),
        ("jobset", "Completed", "finished", 0),
        ("jobset", "Failed", "failed", 1),
        ("trainjob", "Complete", "finished", 0),
        ("trainjob", "Failed", "failed", 1),
    ],
)
def test_status_of_a_job_that_is_over(
    kubernetes: Kubernetes, cluster: StubCluster, kind: str, condition: str, state: str, code: int
) -> None:
    kubernetes(APPLY[0], "--kind", kind, *APPLY[1:])
    set_condition(cluster, KINDS[kind], condition, reason="Reason", message="a message")
    result = kubernetes("status", "train", "--json")
    shown = json.loads(result.out)
    assert (shown["state"], result.code) == (state, code)
    assert shown["reason"] == ("Reason: a message" if code else "")


def test_many_healthy_pods_are_one_line(
    kubernetes: Kubernetes, cluster: StubCluster, snapshot: SnapshotAssertion
) -> None:
    cluster.page = 30  # the list comes in pages
    kubernetes("apply", "--image", "a", "--nodes", "100", "--name", "train", "train.py")
    for node in range(100):
        cluster.put(ended(node, 1) if node == 70 else pod(node))
    assert kubernetes("status", "train").text == snapshot
    assert len(kubernetes("status", "train", "--all").out.splitlines()) > 100


def test_status_without_the_permission_to_list_events(
    kubernetes: Kubernetes, cluster: StubCluster
) -> None:
    kubernetes(*APPLY)
    cluster.forbidden.add(("list", "events"))
    cluster.put(pod(0))
    result = kubernetes("status", "train")
    assert result.code == 0
    assert "no permission to list events" in result.err


# ---- logs


def test_logs_of_a_node(kubernetes: Kubernetes, cluster: StubCluster) -> None:
    kubernetes(*APPLY)
    cluster.put(ended(1, 75, name="train-1-old", age_s=900))
    for node in (0, 1):
        cluster.put(pod(node))
        cluster.logs[f"train-{node}-x{node}"] = [f"output of {node}", "é \x1b[31mred"]
    cluster.logs["train-1-old"] = ["of an earlier pod"]
    assert kubernetes("logs", "train").out == "output of 0\né �[31mred\n"
    assert kubernetes("logs", "train", "--node", "1").out == "output of 1\né �[31mred\n"


def test_logs_of_pods_that_do_not_exist(
    kubernetes: Kubernetes, cluster: StubCluster, snapshot: SnapshotAssertion
) -> None:
    kubernetes(*APPLY)
    result = kubernetes("logs", "train", "--node", "2")
    assert result.code == 2
    assert result.text == snapshot(name="node")
    result = kubernetes("logs", "train")
    assert result.code == 3
    assert result.text == snapshot(name="pod")
    cluster.put(waiting(0, "ContainerCreating"))
    cluster.waiting["train-0-x0"] = "ContainerCreating"
    result = kubernetes("logs", "train")
    assert result.code == 3
    assert result.text == snapshot(name="waiting")


@pytest.mark.parametrize(("condition", "code"), [("Complete", 0), ("Failed", 1)])
def test_following_continues_in_the_next_pod_until_the_job_is_over(
    kubernetes: Kubernetes,
    cluster: StubCluster,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: SnapshotAssertion,
    condition: str,
    code: int,
) -> None:
    monkeypatch.setattr(kubernetes_jobs, "_POLL_S", 0.01)
    kubernetes(*APPLY)
    cluster.put(pod(0, name="train-0-a", age_s=900))
    cluster.logs["train-0-a"] = ["step 1", "step 2"]
    cluster.log_ends["train-0-a"] = threading.Event()

    def replace_pod() -> None:
        cluster.log_requested.wait(60)
        cluster.log_requested.clear()
        cluster.put(
            waiting(0, "ContainerCreating") | {"metadata": pod(0, name="train-0-b")["metadata"]}
        )
        cluster.waiting["train-0-b"] = "ContainerCreating"
        cluster.logs["train-0-b"] = ["step 3"]
        cluster.log_ends["train-0-a"].set()
        cluster.log_requested.wait(60)
        set_condition(cluster, "Job", condition)
        cluster.get("Pod", "train-0-b")["status"]["phase"] = "Succeeded"
        del cluster.waiting["train-0-b"]

    thread = threading.Thread(target=replace_pod)
    thread.start()
    result = kubernetes("logs", "train", "--follow")
    thread.join()
    assert result.code == code
    assert result.text == snapshot


def test_a_connection_that_breaks_repeats_and_loses_no_line(
    kubernetes: Kubernetes,
    cluster: StubCluster,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: SnapshotAssertion,
) -> None:
    monkeypatch.setattr(kubernetes_jobs, "_POLL_S", 0.01)
    kubernetes(*APPLY)
    cluster.put(pod(0))
    cluster.logs["train-0-x0"] = [f"step {number}" for number in range(8)]
    cluster.log_cuts["train-0-x0"] = 3
    usual = time.sleep

    def finish(seconds: float) -> None:
        set_condition(cluster, "Job", "Complete")
        cluster.put(pod(0, phase="Succeeded"))
        usual(seconds)

    monkeypatch.setattr(time, "sleep", finish)
    result = kubernetes("logs", "train", "--follow")
    assert result.out.splitlines() == cluster.logs["train-0-x0"]
    assert result.text == snapshot


def test_a_silent_pod_is_reported_while_following(
    kubernetes: Kubernetes, cluster: StubCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_jobs, "_SILENT_S", 0.05)
    end = cluster.log_ends["train-0-x0"] = threading.Event()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        set_condition(cluster, "Job", "Complete")
        cluster.put(pod(0, phase="Succeeded"))
        end.set()

    kubernetes(*APPLY)
    cluster.put(pod(0))
    cluster.logs["train-0-x0"] = ["step 1"]
    monkeypatch.setattr(output, "say", say)
    assert kubernetes("logs", "train", "--follow").out == "step 1\n"
    assert "train-0-x0" in said[0]


# ---- stop


@pytest.mark.parametrize("kind", KINDS)
def test_stop_deletes(
    kubernetes: Kubernetes, cluster: StubCluster, kind: str, snapshot: SnapshotAssertion
) -> None:
    kubernetes(APPLY[0], "--kind", kind, *APPLY[1:])
    result = kubernetes("stop", "train", "--delete")
    assert result.code == 0
    assert result.text == snapshot
    (left,) = cluster.objects.values()
    assert left["metadata"]["finalizers"] == ["foregroundDeletion"]


@pytest.mark.parametrize("condition", ["Complete", "Failed"])
def test_stop_of_a_job_that_is_over(
    kubernetes: Kubernetes, cluster: StubCluster, condition: str
) -> None:
    kubernetes(*APPLY)
    set_condition(cluster, "Job", condition)
    assert kubernetes("stop", "train").code == 0
    assert "suspend" not in cluster.get("Job", "train")["spec"]


# ---- what goes wrong


def test_a_name_that_does_not_exist(
    kubernetes: Kubernetes, cluster: StubCluster, snapshot: SnapshotAssertion
) -> None:
    result = kubernetes("status", "trian")
    assert result.code == 2
    assert result.text == snapshot(name="none")
    kubernetes(*APPLY)
    kubernetes("apply", "--kind", "jobset", "--image", "a", "--name", "smoke", "train.py")
    cluster.put({"kind": "Job", "metadata": {"name": "trian"}, "spec": {}})  # of another program
    for action in ("status", "logs", "stop"):
        result = kubernetes(action, "trian")
        assert result.code == 2
        assert result.text == snapshot(name="near")


@pytest.mark.parametrize(
    ("forbidden", "words"),
    [
        (("patch", "jobs"), APPLY),
        (("create", "secrets"), APPLY),
        (("get", "services"), APPLY),
        (("list", "jobs"), ("status", "train")),
        (("list", "pods"), ("status", "train")),
        (("get", "pods/log"), ("logs", "train")),
        (("patch", "jobs"), ("stop", "train")),
        (("delete", "jobs"), ("stop", "train", "--delete")),
    ],
)
def test_a_missing_permission(
    kubernetes: Kubernetes,
    cluster: StubCluster,
    forbidden: tuple[str, str],
    words: tuple[str, ...],
    snapshot: SnapshotAssertion,
) -> None:
    if words is not APPLY:
        kubernetes(*APPLY)
        cluster.put(pod(0))
    cluster.forbidden.add(forbidden)
    result = kubernetes(*words)
    assert result.code == 2
    assert result.text == snapshot
    verb, resource = forbidden
    assert f'resources: ["{resource}"]' in result.err
    assert f'"{verb}"' in result.err


def test_kinds_that_may_not_be_listed_do_not_hide_a_job(
    kubernetes: Kubernetes, cluster: StubCluster, snapshot: SnapshotAssertion
) -> None:
    cluster.forbidden |= {("list", "jobsets"), ("list", "trainjobs")}
    kubernetes(*APPLY)
    assert kubernetes("status", "train").code == 0
    result = kubernetes("status", "other")
    assert result.code == 2
    assert result.text == snapshot


REFUSALS: dict[str, tuple[dict[str, Any], int]] = {
    "quota": ({"denied": {"Job": 'jobs.batch "train" is forbidden: exceeded quota: jobs'}}, 2),
    "conflict": ({"owned_by_others": {"Job"}}, 2),
    "namespace": ({"namespaces": set()}, 2),
    "unavailable": ({"unavailable": True}, 3),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal(
    kubernetes: Kubernetes, cluster: StubCluster, case: str, snapshot: SnapshotAssertion
) -> None:
    how, code = REFUSALS[case]
    for name, value in how.items():
        setattr(cluster, name, value)
    result = kubernetes(*APPLY)
    assert result.code == code
    assert result.text == snapshot


def test_what_the_schemas_do_not_have_is_refused(
    kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchmuster.launch.schedulers.kubernetes import manifests

    usual = manifests.render_manifests

    def mistyped(*given: Any) -> list[Document]:
        documents = usual(*given)
        documents[-1]["spec"]["completion"] = 2
        return documents

    monkeypatch.setattr(manifests, "render_manifests", mistyped)
    result = kubernetes(*APPLY)
    assert result.code == 2
    assert "completion" in result.err


def test_wrong_credentials(
    kubernetes: Kubernetes, cluster: StubCluster, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", cluster.server, {"token": "expired"})
    result = kubernetes("status", "train")
    assert result.code == 2
    assert result.text == snapshot(name="token")
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "sh",
        "args": ["-c", "echo token has expired, run: cloud login >&2; exit 3"],
        "interactiveMode": "Never",
    }
    write_kubeconfig(tmp_path / "kubeconfig", cluster.server, {"exec": plugin})
    result = kubernetes("status", "train")
    assert result.code == 2
    assert result.text == snapshot(name="plugin")


def test_no_cluster(
    kubernetes: Kubernetes,
    cluster: StubCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: SnapshotAssertion,
) -> None:
    result = kubernetes("status", "train", "--context", "tema")
    assert result.code == 2
    assert result.text == snapshot(name="context")
    (tmp_path / "kubeconfig").write_text("contexts: [")
    result = kubernetes("status", "train")
    assert result.code == 2
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = kubernetes("status", "train")
    assert result.code == 2
    assert result.text == snapshot(name="file")


def test_a_server_that_does_not_exist(
    kubernetes: Kubernetes, cluster: StubCluster, tmp_path: Path
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        write_kubeconfig(tmp_path / "kubeconfig", address)
        result = kubernetes("status", "train")
    assert result.code == 1
    assert f"cannot reach the API server {address}" in result.err
    assert "kubectl --namespace default cluster-info" in result.err


def test_a_server_that_does_not_answer(
    kubernetes: Kubernetes,
    cluster: StubCluster,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: SnapshotAssertion,
) -> None:
    monkeypatch.setattr(cluster_module, "_ANSWER_S", 1.0)
    monkeypatch.setattr(cluster_module, "_SAY_EVERY_S", 0.1)
    cluster.stall = threading.Event()
    result = kubernetes("status", "train")
    cluster.stall.set()
    assert result.code == 3
    notices = [line for line in result.err.splitlines() if line.startswith("muster: waiting for")]
    assert notices
    assert result.err.removeprefix("".join(f"{line}\n" for line in notices)) == snapshot


def test_an_address_of_something_else(
    kubernetes: Kubernetes, cluster: StubCluster, tmp_path: Path
) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", f"{cluster.server}/proxy")
    assert kubernetes("status", "train").code == 2


def test_the_package_is_not_installed(
    kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    result = kubernetes("status", "train")
    assert result.code == 2
    assert result.text == snapshot
    assert kubernetes("render", *APPLY[1:]).code == 0


def test_in_a_pod_its_service_account_is_used(
    kubernetes: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    result = kubernetes("status", "train")
    assert result.code == 2
    assert "Service token file does not exist" in result.err


def test_the_real_command(muster: Muster, cluster: StubCluster) -> None:
    environment = {"KUBECONFIG": os.environ["KUBECONFIG"]}
    done = muster("kubernetes", *APPLY, env=environment)
    assert (done.code, done.out.splitlines()[-1]) == (0, "job.batch/train created"), done.err
