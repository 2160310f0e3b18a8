"""Render a job as Kubernetes objects: a plain Indexed Job, a JobSet, or a Kubeflow TrainJob.

Pure functions from a job to dictionaries. Every pod runs torchrun with a static rendezvous address, the
first pod's name, and its own node rank, which Kubernetes substitutes in the arguments; so there is one
template for any number of pods, and the image does not need torchmuster.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.kubernetes.request import (
    Kind,
    KubernetesRequest,
    check_kubernetes_request,
    port_of,
    ranks_of,
    shared_memory_bytes_of,
)
from torchmuster.launch.schedulers.time_limits import POD_VARIABLE
from torchmuster.redaction import is_secret_name, redact_text
from torchmuster.units import GiB, KiB, MiB

# Name of the job and its container in Kubeflow's runtime; the JobSet uses the same name.
_NODE = "node"
_SHARED_MEMORY = "shared-memory"
_TO_END_S = 45
# kubectl reads YAML 1.1, in which yes is a boolean and 12:30 a number: quote every string that is not
# a plain word.
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9./-]*[A-Za-z0-9]")
_NO_TEXTS = {"yes", "no", "on", "off", "true", "false", "null"}

Document = dict[str, Any]


def render_manifests(spec: JobSpec, request: KubernetesRequest, kind: Kind) -> list[Document]:
    """Return the objects to create, in the order in which to create them."""
    check_kubernetes_request(spec, request, kind)
    if kind == "job":
        return [_service(spec, request), _job(spec, request)]
    if kind == "jobset":
        return [_jobset(spec, request)]
    return [_trainjob(spec, request)]


def first_address(request: KubernetesRequest, kind: Kind) -> str:
    """Return the DNS name of the first pod."""
    host = f"{request.name}-0" if kind == "job" else f"{request.name}-{_NODE}-0-0"
    return f"{host}.{request.name}"


def _service(spec: JobSpec, request: KubernetesRequest) -> Document:
    """Return the headless Service that gives each pod a name.

    It publishes names before pods are ready: they become ready only after the rendezvous.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(request),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": request.name},
            "ports": [{"name": "rendezvous", "port": port_of(spec)}],
        },
    }


def _job(spec: JobSpec, request: KubernetesRequest) -> Document:
    job = _job_spec(spec, request, "job")
    job["template"]["spec"]["subdomain"] = request.name
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(request),
        "spec": {**job, "ttlSecondsAfterFinished": request.keep_finished_s},
    }


def _jobset(spec: JobSpec, request: KubernetesRequest) -> Document:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(request),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            # A restart replaces all pods together.
            "failurePolicy": _manifests_restarts(spec),
            "ttlSecondsAfterFinished": request.keep_finished_s,
            "replicatedJobs": [
                {
                    "name": _NODE,
                    "replicas": 1,
                    "template": {"spec": _job_spec(spec, request, "jobset")},
                }
            ],
        },
    }


def _manifests_restarts(spec: JobSpec) -> Document:
    """Return the failure policy; the loss of a node does not count as a restart."""
    if not spec.max_restarts:
        return {"maxRestarts": 0}
    taken_away = {
        "name": "takenAway",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {"maxRestarts": spec.max_restarts, "rules": [taken_away]}


def _job_spec(spec: JobSpec, request: KubernetesRequest, kind: Kind) -> Document:
    container: Document = {
        "name": _NODE,
        "image": request.image,
        "command": ["torchrun"],
        "args": _torchrun_flags(spec, request, kind) + _script(spec),
        "env": _environment(spec, request, kind),
        "ports": [{"name": "rendezvous", "containerPort": port_of(spec)}],
        "resources": _resources(request),
        "securityContext": _container_security(),
        "volumeMounts": _volume_mounts(),
    }
    pod: Document = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        # torchrun gives the ranks 30 s of these to save, and uses the rest to kill them.
        "terminationGracePeriodSeconds": _TO_END_S,
        "containers": [container],
        "volumes": _volumes(request),
    }
    if request.run_as_non_root:
        pod["securityContext"] = {"runAsNonRoot": True}
    # Reports to the JobSet that the pod was evicted or preempted, or its node drained.
    taken_away = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]}
    policy = {"podFailurePolicy": {"rules": [taken_away]}} if spec.max_restarts else {}
    return {
        **policy,
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        # The first pod that fails stops the Job and all other pods. A single restarted pod could not
        # rejoin, because the process group no longer exists.
        "backoffLimit": 0,
        "template": {"spec": pod},
    }


def _trainjob(spec: JobSpec, request: KubernetesRequest) -> Document:
    """Return a TrainJob; Kubeflow Trainer sets torchrun's node rank by ``PET_…`` variables."""
    patch: Document = {
        "containers": [
            {
                "name": _NODE,
                "securityContext": _container_security(),
                "volumeMounts": _volume_mounts(),
            }
        ],
        "volumes": _volumes(request),
    }
    if request.run_as_non_root:
        patch["securityContext"] = {"runAsNonRoot": True}
    job_patch = {"name": _NODE, "template": {"spec": {"template": {"spec": patch}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(request),
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": request.image,
                "command": ["torchrun"],
                "args": [_start_timeout(request), *_script(spec)],
                "numNodes": request.nodes,
                "numProcPerNode": ranks_of(spec, request),
                "env": _environment(spec, request, "trainjob"),
                "resourcesPerNode": _resources(request),
            },
            "runtimePatches": [
                {
                    "manager": "torchmuster/manifest",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job_patch]}}},
                }
            ],
        },
    }


def _torchrun_flags(spec: JobSpec, request: KubernetesRequest, kind: Kind) -> list[str]:
    return [
        f"--nnodes={request.nodes}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",  # substituted by Kubernetes, not by a shell
        f"--nproc-per-node={ranks_of(spec, request)}",
        f"--master-addr={first_address(request, kind)}",
        f"--master-port={port_of(spec)}",
        _start_timeout(request),
    ]


def _start_timeout(request: KubernetesRequest) -> str:
    return f"--rdzv-conf=timeout={request.start_timeout_s}"


def _script(spec: JobSpec) -> list[str]:
    module = ["--module"] if spec.module else []
    return module + [_literally(word) for word in spec.command]


def _environment(spec: JobSpec, request: KubernetesRequest, kind: Kind) -> list[Document]:
    threads = {}
    if request.cpu is not None:
        threads["OMP_NUM_THREADS"] = str(max(1, request.cpu // ranks_of(spec, request)))
    # For muster inside the pod, so that it stops its ranks in time.
    to_end = {} if kind == "trainjob" else {POD_VARIABLE: str(_TO_END_S)}
    variables: Mapping[str, str] = {**threads, **to_end, **spec.environment}
    return [_variable(name, value, request) for name, value in variables.items()]


def _variable(name: str, value: str, request: KubernetesRequest) -> Document:
    if not is_secret_name(name) and redact_text(value) == value:
        return {"name": name, "value": _literally(value)}
    if request.secret is None:
        raise Impossible(
            f"{name} is a secret, and the manifest would expose it to everyone who can read the job",
            why="Kubernetes stores such values in a Secret, which the job references",
            fix=f"kubectl create secret generic {request.name}-secrets --from-literal={name}=…  "
            f"# then: --secret {request.name}-secrets",
        )
    return {
        "name": name,
        "valueFrom": {"secretKeyRef": {"name": request.secret, "key": name}},
    }


def _literally(text: str) -> str:
    """Escape $ so that Kubernetes does not expand $(NAME) in user text; it turns $$ into $."""
    return text.replace("$", "$$")


def _resources(request: KubernetesRequest) -> Document:
    amounts: dict[str, str] = {}
    if request.cpu is not None:
        amounts["cpu"] = str(request.cpu)
    if request.memory_bytes is not None:
        amounts["memory"] = _quantity(request.memory_bytes)
    if request.gpus_per_node:
        amounts[request.gpu_resource] = str(request.gpus_per_node)
    # Request equals limit: a pod that uses more than its request may be killed while running.
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _quantity(count: int) -> str:
    for suffix, size in (("Gi", GiB), ("Mi", MiB), ("Ki", KiB)):
        if count % size == 0:
            return f"{count // size}{suffix}"
    return str(count)


def _container_security() -> Document:
    return {"allowPrivilegeEscalation": False}


def _volumes(request: KubernetesRequest) -> list[Document]:
    size = _quantity(shared_memory_bytes_of(request))
    return [{"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": size}}]


def _volume_mounts() -> list[Document]:
    return [{"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}]  # noqa: S108  the mount point itself


def _metadata(request: KubernetesRequest) -> Document:
    metadata: Document = {"name": request.name}
    if request.namespace is not None:
        metadata["namespace"] = request.namespace
    return {**metadata, "labels": {"app.kubernetes.io/managed-by": "torchmuster"}}


class _Quoting(SafeRepresenter):
    def ignore_aliases(self, data: object) -> bool:
        return True

    def text(self, data: str) -> ScalarNode:
        plain = _WORD.fullmatch(data) is not None and data.lower() not in _NO_TEXTS
        tag = "tag:yaml.org,2002:str"
        node: ScalarNode = self.represent_scalar(tag, data, style=None if plain else '"')
        return node


_Quoting.add_representer(str, _Quoting.text)


def to_yaml(documents: Sequence[Document]) -> str:
    """Return the documents as one file for ``kubectl apply -f -``."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Quoting
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 2**20
    stream = io.StringIO()
    yaml.dump_all(documents, stream)
    return stream.getvalue()
