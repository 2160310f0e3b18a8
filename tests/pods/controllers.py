"""The controllers of Job, JobSet and TrainJob: they create pods, replace those that fail, and decide how it ends.

They do what the controllers of Kubernetes 1.33, JobSet 0.8 and Kubeflow Trainer 2 do for the fields that the product renders; a
field that they do not know is an error.
"""

import copy
import os
import random
import select
import string
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from patience import GIVE_UP_S
from pods.kubelet import Document, Node, Pod, Refused

INDEX = "batch.kubernetes.io/job-completion-index"
UID = "batch.kubernetes.io/controller-uid"
_KNOWN = {
    "backoffLimit", "completionMode", "completions", "parallelism", "podFailurePolicy", "podReplacementPolicy", "successPolicy",
    "suspend", "template", "ttlSecondsAfterFinished", "activeDeadlineSeconds",
}  # fmt: skip
_DISRUPTION = "DisruptionTarget"
#: What a failed pod does to its Job.
FAIL_JOB, IGNORE, COUNT = "FailJob", "Ignore", "Count"


@dataclass(frozen=True, kw_only=True)
class PodEnd:
    """The end of a container: which pod, how, and what the controller did about it."""

    at_s: float
    pod: str
    index: int
    exit_code: int | None
    disrupted: bool
    action: str


def action_for(policy: Document | None, exit_code: int | None, *, disrupted: bool) -> str:
    """Return the action of the first rule of a pod failure policy that matches."""
    for rule in (policy or {}).get("rules", []):
        conditions = [one["type"] for one in rule.get("onPodConditions", [])]
        if disrupted and _DISRUPTION in conditions:
            return str(rule["action"])
        codes = rule.get("onExitCodes")
        if not codes or not exit_code:  # 0 never matches
            continue
        if (exit_code in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
    return COUNT


def indexes_of(text: str) -> set[int]:
    """Return the indexes of a list such as ``0,2-4``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def success_is_met(policy: Document | None, succeeded: set[int], completions: int) -> bool:
    """Return whether the pods that succeeded are enough for the Job."""
    if policy is None:
        return len(succeeded) == completions
    for rule in policy["rules"]:
        wanted = indexes_of(rule["succeededIndexes"]) if "succeededIndexes" in rule else None
        done = succeeded if wanted is None else succeeded & wanted
        enough = rule.get("succeededCount", len(wanted) if wanted is not None else completions)
        if len(done) >= enough:
            return True
    return False


class Job:
    """An Indexed Job: one pod for each index, until it succeeded or failed.

    ``condition`` is None while it runs, then ``Complete`` or ``Failed`` with a ``reason``. A replacement is created at once: the
    back-off of Kubernetes (10 s, 20 s, ... up to 6 min) would only make tests longer.
    """

    def __init__(
        self,
        node: Node,
        document: Document,
        *,
        subdomain: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.name: str = document["metadata"]["name"]
        self.spec: Document = document["spec"]
        if unknown := self.spec.keys() - _KNOWN:
            raise Refused(f"the lab does not know these fields of a Job: {sorted(unknown)}")
        if self.spec.get("completionMode") != "Indexed":
            raise Refused("the lab knows only Indexed Jobs")
        self.uid = str(uuid.uuid4())
        self.completions = int(self.spec["completions"])
        self.ends: list[PodEnd] = []
        self.all_pods: list[Pod] = []
        self.condition: str | None = None
        self.reason = ""
        self._node = node
        self._subdomain = subdomain
        self._labels = dict(labels or {})
        self._current: dict[int, Pod] = {}
        self._succeeded: set[int] = set()
        self._failures = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._wake, self._waker = os.pipe()
        self._stop = False
        self._check()
        self._thread = threading.Thread(target=self._run, name=f"job {self.name}")

    def start(self) -> None:
        """Create the pods and watch them from a thread."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the Job is over."""
        return self.condition is not None

    def pod(self, index: int) -> Pod:
        """Return the current pod of an index, once it runs."""
        with self._changed:
            self._await(lambda: index in self._current and self._current[index].pid > 0)
            return self._current[index]

    def await_replacement(self, pod: Pod) -> Pod:
        """Return the pod that replaced this one, once it runs."""

        def replaced() -> bool:
            current = self._current.get(pod.index)
            return current is not None and current is not pod and current.pid > 0

        with self._changed:
            self._await(replaced)
            return self._current[pod.index]

    def wait(self, timeout_s: float = GIVE_UP_S) -> str:
        """Wait for the end of the Job and of all its pods; return the condition."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive() or self.condition is None:
            raise AssertionError(f"{self.name} runs after {timeout_s:g} s\n{self.logs()}")
        return self.condition

    def logs(self) -> str:
        """Return the output of all pods that there were."""
        return "\n".join(
            f"--- {pod.name} {pod.address} exit {pod.exit_code} ---\n{pod.log()}"
            for pod in self.all_pods
        )

    def close(self) -> None:
        """Stop watching, and remove all pods."""
        self._stop = True
        os.write(self._waker, b"x")
        if self._thread.ident is not None:
            self._thread.join(GIVE_UP_S)
        for pod in self.all_pods:
            pod.discard()
        for pod in self.all_pods:
            pod.close()
        os.close(self._wake)
        os.close(self._waker)

    def _check(self) -> None:
        """Refuse what the API server refuses."""
        policy = self.spec["template"]["spec"].get("restartPolicy")
        if policy not in ("Never", "OnFailure"):
            raise Refused(f"restartPolicy {policy} is not allowed in a Job")
        if "podFailurePolicy" in self.spec and policy != "Never":
            raise Refused("podFailurePolicy needs restartPolicy Never")

    def _await(self, true: Any) -> None:
        def ready() -> bool:
            return self._error is not None or self.done or bool(true())

        self._changed.wait_for(ready, GIVE_UP_S)
        if self._error is not None:
            raise self._error
        if not true():
            raise AssertionError(f"{self.name}: no such pod ({self.condition})\n{self.logs()}")

    def _run(self) -> None:
        try:
            for index in range(self.completions):
                self._create(index)
            while not self.done and not self._stop:
                self._look()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._changed.notify_all()

    def _create(self, index: int) -> None:
        template = copy.deepcopy(self.spec["template"])
        metadata = template.setdefault("metadata", {})
        name = f"{self.name}-{index}-{''.join(random.choices(string.ascii_lowercase, k=5))}"
        ours = {
            "batch.kubernetes.io/job-name": self.name, "job-name": self.name,
            UID: self.uid, "controller-uid": self.uid, INDEX: str(index),
        }  # fmt: skip
        metadata["labels"] = {**metadata.get("labels", {}), **self._labels, **ours}
        metadata["annotations"] = {**metadata.get("annotations", {}), INDEX: str(index)}
        metadata |= {"name": name, "namespace": "default", "uid": str(uuid.uuid4())}
        spec = template["spec"]
        if self._subdomain is not None:
            spec["subdomain"] = self._subdomain
        for container in spec["containers"]:
            names = [variable["name"] for variable in container.setdefault("env", [])]
            if "JOB_COMPLETION_INDEX" not in names:  # appended: values before it do not see it
                field = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
                container["env"].append({"name": "JOB_COMPLETION_INDEX", "valueFrom": field})
        host = f"{self.name}-{index}"
        pod = Pod(node=self._node, name=name, index=index, host=host, document=template)
        self.all_pods.append(pod)
        pod.create()
        with self._changed:
            self._current[index] = pod
            self._changed.notify_all()

    def _look(self) -> None:
        """Wait until a container is over, and act."""
        active = [pod for index, pod in self._current.items() if index not in self._succeeded]
        watched: dict[int, Pod] = {}
        over = []
        try:
            for pod in active:
                try:
                    watched[os.pidfd_open(pod.pid)] = pod
                except (ProcessLookupError, OSError, ValueError):
                    over.append(pod)
            if not over:
                ready, _, _ = select.select([*watched, self._wake], [], [])
                over = [watched[one] for one in ready if one in watched]
        finally:
            for descriptor in watched:
                os.close(descriptor)
        for pod in over:
            if self._stop or self.done:
                return
            self._act_on(pod)

    def _act_on(self, pod: Pod) -> None:
        code = pod.wait()
        disrupted = pod.disrupted
        if code == 0:
            self._note(pod, "Succeeded")
            self._succeeded.add(pod.index)
            if success_is_met(self.spec.get("successPolicy"), self._succeeded, self.completions):
                self._end("Complete", "SuccessPolicy" if "successPolicy" in self.spec else "")
            return
        action = action_for(self.spec.get("podFailurePolicy"), code, disrupted=disrupted)
        self._note(pod, action)
        if action == FAIL_JOB:
            self._end("Failed", "PodFailurePolicy")
            return
        if action == COUNT:
            self._failures += 1
            if self._failures > int(self.spec.get("backoffLimit", 6)):
                self._end("Failed", "BackoffLimitExceeded")
                return
        in_place = self.spec["template"]["spec"]["restartPolicy"] == "OnFailure"
        if in_place and not disrupted:
            pod.restart()
            with self._changed:
                self._changed.notify_all()
            return
        pod.discard()
        self._create(pod.index)

    def _note(self, pod: Pod, action: str) -> None:
        end = PodEnd(
            at_s=time.time(),
            pod=pod.name,
            index=pod.index,
            exit_code=pod.exit_code,
            disrupted=pod.disrupted,
            action=action,
        )
        self.ends.append(end)

    def _end(self, condition: str, reason: str) -> None:
        """Stop the pods that still run, then set the condition."""
        left = [
            pod
            for index, pod in self._current.items()
            if index not in self._succeeded and pod.exit_code is None
        ]
        stopping = [threading.Thread(target=pod.terminate) for pod in left]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        for pod in left:
            self._note(pod, "Terminated")
        with self._changed:
            self.condition, self.reason = condition, reason
            self._changed.notify_all()


class JobSet:
    """A JobSet: its Jobs, which restart together when one fails and a rule says so."""

    def __init__(self, node: Node, document: Document) -> None:
        self.name: str = document["metadata"]["name"]
        self.spec: Document = document["spec"]
        known = {
            "failurePolicy",
            "network",
            "replicatedJobs",
            "successPolicy",
            "suspend",
            "ttlSecondsAfterFinished",
        }
        if unknown := self.spec.keys() - known:
            raise Refused(f"the lab does not know these fields of a JobSet: {sorted(unknown)}")
        self.restarts = 0
        self.attempts: list[Job] = []
        (self._replicated,) = self.spec["replicatedJobs"]
        assert int(self._replicated.get("replicas", 1)) == 1
        self._node = node
        self._new()

    def start(self) -> None:
        """Start the Job."""
        self.job.start()

    @property
    def job(self) -> Job:
        """The Job of the current attempt."""
        return self.attempts[-1]

    def wait(self, timeout_s: float = GIVE_UP_S) -> str:
        """Wait for the end; return the condition. A restart happens here."""
        while True:
            condition = self.job.wait(timeout_s)
            if condition == "Complete":
                return "Completed"
            if not self._restarts_after(self.job.reason):
                return "Failed"
            self._new()
            self.start()

    def close(self) -> None:
        """Remove all pods."""
        for job in self.attempts:
            job.close()

    def _restarts_after(self, reason: str) -> bool:
        policy = self.spec.get("failurePolicy", {})
        action = "RestartJobSet"
        for rule in policy.get("rules", []):
            if reason in rule.get("onJobFailureReasons", [reason]):
                action = rule["action"]
                break
        if action == "FailJobSet":
            return False
        if action == "RestartJobSet":
            self.restarts += 1
            return self.restarts <= int(policy.get("maxRestarts", 0))
        return True

    def _new(self) -> None:
        template = copy.deepcopy(self._replicated["template"])
        name = f"{self.name}-{self._replicated['name']}-0"
        spec = template["spec"]
        # The defaults of JobSet's webhook.
        spec.setdefault("completionMode", "Indexed")
        spec["template"]["spec"].setdefault("restartPolicy", "OnFailure")
        labels = {
            "jobset.sigs.k8s.io/jobset-name": self.name,
            "jobset.sigs.k8s.io/replicatedjob-name": self._replicated["name"],
            "jobset.sigs.k8s.io/restart-attempt": str(self.restarts),
        }
        subdomain = self.spec.get("network", {}).get("subdomain", self.name)
        document = {"metadata": {"name": name}, "spec": spec}
        self.attempts.append(Job(self._node, document, subdomain=subdomain, labels=labels))


def runtime(nodes: int) -> Document:
    """Return the JobSet of the runtime ``torch-distributed`` of Kubeflow Trainer, for a number of nodes."""
    pod = {"containers": [{"name": "node", "image": "pytorch/pytorch"}]}
    job = {"completions": nodes, "parallelism": nodes, "template": {"spec": pod}}
    return {
        "network": {"publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
    }


def jobset_of(document: Document) -> Document:
    """Return the JobSet that Kubeflow Trainer creates for a TrainJob."""
    name, spec = document["metadata"]["name"], document["spec"]
    if spec["runtimeRef"]["name"] != "torch-distributed":
        raise Refused(f"no runtime {spec['runtimeRef']}")
    trainer = spec["trainer"]
    nodes = int(trainer.get("numNodes", 1))
    made = runtime(nodes)
    job = made["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    container["env"] = [
        *trainer.get("env", []),
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer.get("numProcPerNode", "auto"))},
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": "29400"},
    ]
    for patch in spec.get("runtimePatches", []):
        for change in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            assert change["name"] == "node"
            made["replicatedJobs"][0]["template"] = merge(
                made["replicatedJobs"][0]["template"], change["template"]
            )
    return {"metadata": {"name": name}, "spec": made}


def merge(base: Any, patch: Any) -> Any:
    """Merge as a strategic merge patch does: lists of named things by name, or by mount path."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            merged[key] = merge(base[key], value) if key in base else value
        return merged
    if isinstance(base, list) and isinstance(patch, list) and _keyed(base) and _keyed(patch):
        found = {_key(item): item for item in base}
        for item in patch:
            found[_key(item)] = merge(found.get(_key(item), {}), item)
        return list(found.values())
    return patch


def _keyed(items: Sequence[Any]) -> bool:
    return all(isinstance(item, dict) and ("mountPath" in item or "name" in item) for item in items)


def _key(item: Document) -> str:
    with suppress(KeyError):
        return str(item["mountPath"])
    return str(item["name"])
