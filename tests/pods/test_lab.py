"""The lab itself, with plain scripts in the pods: names, addresses, users, volumes, and what the controllers do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from hosts.namespaces import await_true
from pods.controllers import Job, action_for, indexes_of, jobset_of, merge, success_is_met
from pods.kubelet import Refused, check_user, expand, variables_of
from pods.lab import PodLab
from pods.podman import LABEL

#: Serves its own index, writes down what it sees of itself and of the others, and does what a file tells it to.
SCRIPT = """
import json, os, pathlib, signal, socket, sys, threading, time
index, nodes = int(os.environ["RANK_OF_NODE"]), int(sys.argv[1])
runs = pathlib.Path("/runs")
def writable(folder):
    try:
        pathlib.Path(folder, "x").write_text("x")
    except OSError:
        return False
    return True
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
seen = {"user": os.getuid(), "pid": os.getpid(), "host": socket.gethostname(), "arguments": sys.argv[2:], "name": os.environ["POD"],
        "secret": os.environ["WORD"], "uid": os.environ["JOB_UID"], "capabilities": int(status["CapEff"], 16),
        "writable": [one for one in ("/", "/etc", "/home/muster", "/usr", "/tmp", "/dev/shm", "/runs") if writable(one)],
        "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize}
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
server = socket.create_server(("", 2000))
def serve():
    while True:
        with server.accept()[0] as connection:
            connection.sendall(str(index).encode())
threading.Thread(target=serve, daemon=True).start()
met = {}
while True:
    time.sleep(0.05)
    for other in range(nodes):
        name = f"train-{other}.train"
        try:
            with socket.create_connection((name, 2000), timeout=1) as connection:
                if connection.recv(9) == str(other).encode():
                    met[other] = connection.getpeername()[0]
        except OSError:
            pass
    partial = runs / f".{index}"
    partial.write_text(json.dumps({**seen, "met": met}))
    partial.rename(runs / f"{index}.json")
    order = runs / f"exit-{index}"
    if order.exists():
        code = int(order.read_text())
        order.unlink()
        os._exit(code)
"""


def manifest(lab: PodLab, *, nodes: int = 2, **spec: Any) -> str:
    """Return a Service and an Indexed Job like the product's."""
    container = {
        "name": "node",
        "image": lab.image,
        "command": ["python"],
        "args": ["script.py", str(nodes), "$(JOB_COMPLETION_INDEX)", "$$(HOME)", "$(NO_SUCH)"],
        "env": [
            {"name": "RANK_OF_NODE", "valueFrom": field("annotations['batch.kubernetes.io/job-completion-index']")},
            {"name": "POD", "valueFrom": field("name")},
            {"name": "JOB_UID", "valueFrom": field("labels['batch.kubernetes.io/controller-uid']")},
            {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "train-join", "key": "secret"}}},
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }  # fmt: skip
    pod = {
        "restartPolicy": "Never",
        "subdomain": "train",
        "terminationGracePeriodSeconds": 45,
        "securityContext": {"runAsNonRoot": True, "fsGroup": 1000},
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "template": {"spec": pod},
        **spec,
    }
    service = {"clusterIP": "None", "selector": {"batch.kubernetes.io/job-name": "train"}}
    documents = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "train"}, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": job},
    ]
    return "\n---\n".join(json.dumps(document) for document in documents)


def field(path: str) -> dict[str, object]:
    return {"fieldRef": {"fieldPath": f"metadata.{path}"}}


POLICIES: dict[str, Any] = {
    "backoffLimit": 100,
    "podFailurePolicy": {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
            {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [75, 137, 143]}},
        ]
    },
    "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[PodLab]:
    with PodLab(tmp_path / "lab", {"script.py": SCRIPT}) as lab:
        lab.claim("runs")
        lab.secret("train-join", {"secret": "said to nobody"})
        yield lab


def seen(lab: PodLab, index: int) -> dict[str, Any]:
    file = lab.node.claims["runs"] / f"{index}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def await_met(lab: PodLab, index: int, others: dict[int, str]) -> None:
    """Wait until a pod has reached others at these addresses."""
    wanted = {str(other): address for other, address in others.items()}
    await_true(
        f"pod {index} reached {others}",
        lambda: wanted.items() <= seen(lab, index).get("met", {}).items(),
    )


def run(lab: PodLab, **spec: Any) -> Job:
    job = lab.apply(manifest(lab, **spec))
    assert isinstance(job, Job)
    return job


def test_pods_are_restricted_and_a_replaced_one_has_another_address(lab: PodLab) -> None:
    job = run(lab, **POLICIES)
    first, second = job.pod(0), job.pod(1)
    await_met(lab, 0, {0: first.address, 1: second.address})
    await_met(lab, 1, {0: first.address, 1: second.address})
    found = seen(lab, 1)
    assert (found["user"], found["pid"], found["host"]) == (1000, 1, "train-1")
    assert found["arguments"] == ["1", "$(HOME)", "$(NO_SUCH)"]
    assert (found["name"], found["uid"]) == (second.name, job.uid)
    assert found["secret"] == "said to nobody"
    assert found["capabilities"] == 0
    assert found["writable"] == ["/tmp", "/dev/shm", "/runs"]
    assert found["shm"] == 64 * 2**20
    second.remove()
    third = job.await_replacement(second)
    assert third.address != second.address
    await_met(lab, 0, {1: third.address})
    second = third
    second.evict()  # the script exits 75
    third = job.await_replacement(second)
    await_met(lab, 0, {1: third.address})
    third.kill()
    fourth = job.await_replacement(third)
    await_met(lab, 0, {1: fourth.address})
    assert [(end.exit_code, end.action) for end in job.ends[1:]] == [(75, "Ignore"), (137, "Count")]
    assert (job.ends[0].disrupted, job.ends[0].action) == (True, "Ignore")
    (lab.node.claims["runs"] / "exit-0").write_text("0")
    assert job.wait() == "Complete"
    assert job.ends[-1].action == "Terminated"  # the other pod got SIGTERM
    assert fourth.exit_code == 75


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("code", "spec", "reason"),
    [(1, POLICIES, "PodFailurePolicy"), (75, {"backoffLimit": 0}, "BackoffLimitExceeded")],
)
def test_a_pod_fails_its_job(lab: PodLab, code: int, spec: dict[str, Any], reason: str) -> None:
    job = run(lab, **spec)
    await_true("the pods run", lambda: bool(seen(lab, 1)))
    (lab.node.claims["runs"] / "exit-1").write_text(str(code))
    assert (job.wait(), job.reason) == ("Failed", reason)
    assert len(job.all_pods) == 2  # nothing was replaced


@pytest.mark.nightly
def test_everything_is_removed(tmp_path: Path) -> None:
    with PodLab(tmp_path / "lab", {"script.py": SCRIPT}) as lab:
        lab.claim("runs")
        lab.secret("train-join", {"secret": "said to nobody"})
        job = run(lab)
        job.pod(1)
        podman, ours = lab.node.podman, f"label={LABEL}={lab.name}"
        assert len(podman("pod", "ps", "-q", "--filter", ours).split()) == 2
    assert podman("pod", "ps", "-q", "--filter", ours) == ""
    assert podman("ps", "-aq", "--filter", ours) == ""
    assert podman("network", "ls", "-q", "--filter", ours) == ""
    assert podman("images", "-q", "--filter", ours) == ""
    assert lab.name not in Path("/proc/mounts").read_text()


def test_variables_are_expanded_as_by_the_kubelet() -> None:
    container = {
        "env": [
            {"name": "EARLY", "value": "$(LATE)"},
            {"name": "LATE", "value": "1"},
            {"name": "THEN", "value": "$(LATE)$$(LATE)"},
        ]
    }
    assert variables_of(container, {}, {}) == {"EARLY": "$(LATE)", "LATE": "1", "THEN": "1$(LATE)"}
    assert expand("$(A)-$(B)-$C", {"A": "x"}) == "x-$(B)-$C"


@pytest.mark.parametrize("user", ["", "0", "muster"])
def test_an_image_without_a_numeric_user_is_refused(user: str) -> None:
    with pytest.raises(Refused):
        check_user({"runAsNonRoot": True}, user)
    assert check_user({"runAsNonRoot": True, "runAsUser": 5}, user) == 5
    assert check_user({"runAsNonRoot": True}, "7:7") == 7


def test_policies() -> None:
    policy = POLICIES["podFailurePolicy"]
    assert action_for(policy, 1, disrupted=True) == "Ignore"
    assert action_for(policy, 1, disrupted=False) == "FailJob"
    assert action_for(policy, 75, disrupted=False) == "Count"
    assert action_for(None, 1, disrupted=True) == "Count"
    assert indexes_of("0,2-4") == {0, 2, 3, 4}
    assert success_is_met(POLICIES["successPolicy"], {0}, 4)
    assert not success_is_met(POLICIES["successPolicy"], {1, 2, 3}, 4)
    assert success_is_met(None, {0, 1}, 2)


def test_a_trainjob_is_merged_into_its_runtime() -> None:
    patch = {"template": {"spec": {"containers": [{"name": "node", "tty": True}], "volumes": []}}}
    document = YAML(typ="safe").load(
        json.dumps(
            {
                "metadata": {"name": "train"},
                "spec": {
                    "runtimeRef": {"name": "torch-distributed"},
                    "trainer": {"image": "mine", "numNodes": 3, "command": ["x"]},
                    "runtimePatches": [
                        {
                            "trainingRuntimeSpec": {
                                "template": {
                                    "spec": {"replicatedJobs": [{"name": "node", "template": {"spec": patch}}]}
                                }
                            }
                        }
                    ],
                },
            }
        )
    )  # fmt: skip
    job = jobset_of(document)["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert (job["completions"], container["image"], container["tty"]) == (3, "mine", True)
    assert {"name": "PET_MASTER_ADDR", "value": "train-node-0-0.train"} in container["env"]
    assert merge({"a": [1]}, {"a": [2]}) == {"a": [2]}
