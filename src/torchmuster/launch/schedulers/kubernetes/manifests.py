"""Render a job as Kubernetes objects: a plain Indexed Job, a JobSet, or a Kubeflow TrainJob.

Pure functions from a job to dictionaries. Every pod runs the same ``muster run`` or ``muster train`` and finds its
node rank in the environment (schedulers/node_group.py), so there is one template for any number of pods. Pod 0 is the
launcher. It restarts the ranks of all pods, and lets pods that were replaced join again, so the cluster only has to
replace a pod that ended, and needs to know which exit codes mean that.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers import node_group
from torchmuster.launch.schedulers.kubernetes.request import (
    Kind,
    KubernetesRequest,
    check_kubernetes_request,
    join_secret_name,
    ranks_of,
    shared_memory_bytes_of,
)
from torchmuster.launch.schedulers.time_limits import POD_VARIABLE
from torchmuster.redaction import is_secret_name, redact_text
from torchmuster.units import GiB, KiB, MiB

MANAGED_BY = {"app.kubernetes.io/managed-by": "torchmuster"}
NAME_LABEL = "app.kubernetes.io/name"
RUN_LABEL = "torchmuster/run"
SECRET_KEY = "secret"  # noqa: S105  a key's name
RUNS = "/runs"
# Name of the job and its container in Kubeflow's runtime; the JobSet uses the same name.
_NODE = "node"
_SHARED_MEMORY = "shared-memory"
_TEMPORARY = "temporary"
_METRICS = "metrics"
_METRICS_FOLDER = "/etc/torchmuster"
_METRICS_PORT = 9477
# Beyond the ranks' grace period: for the launcher, to kill ranks that do not stop, and to exit.
_TO_END_S = 15
# The launcher decides when a run has failed (--max-restarts); this stops a pod that can never start.
_REPLACEMENTS = 100
# kubectl reads YAML 1.1, in which yes is a boolean and 12:30 a number: quote every string that is not
# a plain word.
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9./-]*[A-Za-z0-9]")
_NO_TEXTS = {"yes", "no", "on", "off", "true", "false", "null"}

Document = dict[str, Any]


def render_manifests(spec: JobSpec, request: KubernetesRequest, kind: Kind) -> list[Document]:
    """Return the objects to create, in the order in which to create them."""
    check_kubernetes_request(spec, request, kind)
    if kind == "job":
        return [_service(request), _job(spec, request)]
    if kind == "jobset":
        return [_jobset(spec, request)]
    return [_trainjob(spec, request)]


def secret_command(name: str, namespace: str | None) -> str:
    """Return the command that creates the Secret with which the pods find each other."""
    where = "" if namespace is None else f" --namespace {namespace}"
    value = f'--from-literal={SECRET_KEY}="$(openssl rand -hex 32)"'
    return f"kubectl create secret generic{where} {join_secret_name(name)} {value}"


def first_address(request: KubernetesRequest, kind: Kind) -> str:
    """Return the DNS name of the first pod."""
    host = f"{request.name}-0" if kind == "job" else f"{request.name}-{_NODE}-0-0"
    return f"{host}.{request.name}"


def _service(request: KubernetesRequest) -> Document:
    """Return the headless Service that gives each pod a name, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(request),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": request.name},
            "ports": [{"name": "join", "port": node_group.LAUNCHER_PORT}],
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
            # The launcher restarts the ranks; a restart of the JobSet would replace all pods.
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": request.keep_finished_s,
            "replicatedJobs": [
                {
                    "name": _NODE,
                    "replicas": 1,
                    "template": {
                        "metadata": {"labels": _labels(request)},
                        "spec": _job_spec(spec, request, "jobset"),
                    },
                }
            ],
        },
    }


def _job_spec(spec: JobSpec, request: KubernetesRequest, kind: Kind) -> Document:
    return {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimit": _REPLACEMENTS,
        "podFailurePolicy": {"rules": _replacement_rules()},
        # A pod that is replaced while the launcher exits would never find it again.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": {
            "metadata": {"labels": _labels(request), **_annotations(request)},
            "spec": _pod(spec, request, kind),
        },
    }


def _replacement_rules() -> list[Document]:
    """Return which pods are replaced: those that were evicted, killed or stopped. Any other exit code ends the Job."""
    codes = sorted(int(code) for code in node_group.COMES_BACK)
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": _NODE, "operator": "NotIn", "values": codes},
        },
    ]


def _pod(spec: JobSpec, request: KubernetesRequest, kind: Kind) -> Document:
    container: Document = {
        "name": _NODE,
        "image": request.image,
        "command": ["muster"],
        "args": _arguments(spec, request),
        "env": _environment(spec, request, kind),
        "ports": [{"name": "join", "containerPort": node_group.LAUNCHER_PORT}],
        "resources": _resources(request),
        "securityContext": _container_security(),
        "volumeMounts": _volume_mounts(),
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _seconds_to_end(spec),
        "securityContext": _pod_security(request),
        **({} if request.metrics_secret is None else {"initContainers": [_exporter(request)]}),
        "containers": [container],
        "volumes": _volumes(request),
    }


def _trainjob(spec: JobSpec, request: KubernetesRequest) -> Document:
    """Return a TrainJob. Kubeflow Trainer adds variables for torchrun, which Muster ignores."""
    pod: Document = {
        "terminationGracePeriodSeconds": _seconds_to_end(spec),
        "securityContext": _pod_security(request),
        "containers": [
            {
                "name": _NODE,
                "securityContext": _container_security(),
                "volumeMounts": _volume_mounts(),
            }
        ],
        "volumes": _volumes(request),
    }
    template = {"metadata": {"labels": _labels(request)}, "spec": pod}
    job_patch = {"name": _NODE, "template": {"spec": {"template": template}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(request),
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": request.image,
                "command": ["muster"],
                "args": _arguments(spec, request),
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


def _exporter(request: KubernetesRequest) -> Document:
    """Return the container that serves metrics as long as the pod runs (a sidecar: Kubernetes 1.29 or newer)."""
    probe = {"httpGet": {"path": "/healthz", "port": _METRICS, "scheme": "HTTPS"}}
    return {
        "name": "exporter",
        "image": request.image,
        "restartPolicy": "Always",
        "command": ["muster"],
        "args": [
            "exporter",
            f"--runs={RUNS}",
            "--address=0.0.0.0",
            f"--port={_METRICS_PORT}",
            f"--token-file={_METRICS_FOLDER}/token",
            f"--certificate={_METRICS_FOLDER}/tls.pem",
        ],
        "env": _usual_variables(),
        "ports": [{"name": _METRICS, "containerPort": _METRICS_PORT}],
        "startupProbe": {**probe, "failureThreshold": 30, "periodSeconds": 2},
        "livenessProbe": {**probe, "periodSeconds": 30},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "securityContext": _container_security(),
        "volumeMounts": [
            {"name": "runs", "mountPath": RUNS, "readOnly": True},
            {"name": _TEMPORARY, "mountPath": "/tmp"},  # noqa: S108  the mount point itself
            {"name": _METRICS, "mountPath": _METRICS_FOLDER, "readOnly": True},
        ],
    }


def _arguments(spec: JobSpec, request: KubernetesRequest) -> list[str]:
    """Return the arguments of ``muster``; the user's own follow and take precedence."""
    flags = [
        f"--runs={RUNS}",
        f"--join-timeout={request.join_timeout_s}s",
        f"--max-restarts={spec.max_restarts}",
        f"--grace={spec.limits.grace_s:g}s",
    ]
    if not request.gpus_per_node:
        flags += ["--device=cpu", f"--ranks={ranks_of(spec, request)}"]
    elif spec.ranks is not None:
        flags.append(f"--num-gpus={spec.ranks}")
    if spec.port is not None:
        flags.append(f"--port={spec.port}")
    words = [_literally(word) for word in spec.command]
    if request.subcommand == "train":
        return ["train", *flags, *words]
    return ["run", *flags, "--", *(["-m"] if spec.module else []), *words]


def _environment(spec: JobSpec, request: KubernetesRequest, kind: Kind) -> list[Document]:
    threads = {}
    if request.cpu is not None:
        threads["OMP_NUM_THREADS"] = str(max(1, request.cpu // ranks_of(spec, request)))
    variables: Mapping[str, str] = {**threads, **spec.environment}
    others = [
        {
            "name": node_group.LAUNCHER,
            "value": f"{first_address(request, kind)}:{node_group.LAUNCHER_PORT}",
        },
        _from_secret(node_group.SECRET, join_secret_name(request.name), SECRET_KEY),
    ]
    return [
        {"name": node_group.NODES, "value": str(request.nodes)},
        # Not $(JOB_COMPLETION_INDEX): the cluster defines that variable after these, so it would not be substituted.
        _from_pod(node_group.NODE_RANK, "annotations['batch.kubernetes.io/job-completion-index']"),
        *(others if request.nodes > 1 else ()),
        {"name": node_group.RUN_ID, "value": request.name},
        _from_pod(node_group.JOB_UID, "labels['batch.kubernetes.io/controller-uid']"),
        {"name": POD_VARIABLE, "value": str(_seconds_to_end(spec))},
        *_usual_variables(),
        *(_variable(name, value, request) for name, value in variables.items()),
    ]


def _usual_variables() -> list[Document]:
    """Return what programs expect of a user; the numeric user may not be known in the image."""
    return [{"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "muster"}]  # noqa: S108


def _seconds_to_end(spec: JobSpec) -> int:
    return math.ceil(spec.limits.grace_s) + _TO_END_S


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
    return _from_secret(name, request.secret, name)


def _from_secret(name: str, secret: str, key: str) -> Document:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _from_pod(name: str, where: str) -> Document:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.{where}"}}}


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
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _pod_security(request: KubernetesRequest) -> Document:
    security: Document = {"seccompProfile": {"type": "RuntimeDefault"}}
    if request.user is None:
        return security
    numbers = {"runAsUser": request.user, "runAsGroup": request.user, "fsGroup": request.user}
    # Without this, the kubelet changes the owner of every file in the volume before each start.
    policy = {"fsGroupChangePolicy": "OnRootMismatch"}
    return {"runAsNonRoot": True, **numbers, **policy, **security}


def _volumes(request: KubernetesRequest) -> list[Document]:
    size = _quantity(shared_memory_bytes_of(request))
    runs: Document = {"emptyDir": {}}
    if request.volume is not None:
        runs = {"persistentVolumeClaim": {"claimName": request.volume}}
    metrics = {"name": _METRICS, "secret": {"secretName": request.metrics_secret}}
    return [
        {"name": "runs", **runs},
        {"name": _TEMPORARY, "emptyDir": {}},
        {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": size}},
        *([] if request.metrics_secret is None else [metrics]),
    ]


def _volume_mounts() -> list[Document]:
    return [
        {"name": "runs", "mountPath": RUNS},
        {"name": _TEMPORARY, "mountPath": "/tmp"},  # noqa: S108  the mount points themselves
        {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"},  # noqa: S108
    ]


def _labels(request: KubernetesRequest) -> dict[str, str]:
    return {**MANAGED_BY, NAME_LABEL: request.name, RUN_LABEL: request.name}


def _annotations(request: KubernetesRequest) -> Document:
    """Return what a Prometheus that discovers pods by annotations needs."""
    if request.metrics_secret is None:
        return {}
    facts = {"scrape": "true", "port": str(_METRICS_PORT), "scheme": "https", "path": "/metrics"}
    return {"annotations": {f"prometheus.io/{name}": value for name, value in facts.items()}}


def _metadata(request: KubernetesRequest) -> Document:
    metadata: Document = {"name": request.name}
    if request.namespace is not None:
        metadata["namespace"] = request.namespace
    return {**metadata, "labels": _labels(request)}


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
