"""The resources that a job requests from Kubernetes, and their validation."""

import re
from dataclasses import dataclass
from typing import Literal

from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers import node_group
from torchmuster.redaction import redact_command
from torchmuster.units import GiB, MiB, format_bytes

Kind = Literal["trainjob", "job", "jobset"]
GpuResource = Literal["nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/xe"]

# Names of a Service and a TrainJob must not begin with a digit, so the stricter DNS rule applies.
_LABEL = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST_LABEL = 63


@dataclass(frozen=True, kw_only=True)
class KubernetesRequest:
    """The pods of a job: their number, image and resources.

    Command, ranks per pod, port, variables, restarts and grace period come from the job. ``cpu`` and
    ``memory_bytes`` are both request and limit; None uses the cluster's default. Shared memory counts
    as memory; the default is half of it, or 8 GiB without ``memory_bytes``. ``secret`` is the name of
    the Secret that holds secret variables, ``metrics_secret`` of the one with the exporter's token and certificate (None:
    no exporter). ``volume`` is a claim that all pods share; without it, a pod's run folder ends with the pod. ``user``: the
    numeric user of the pods, None for the image's own.
    """

    name: str
    image: str
    subcommand: Literal["run", "train"] = "run"
    nodes: int = 1
    gpus_per_node: int = 0
    gpu_resource: GpuResource = "nvidia.com/gpu"
    cpu: int | None = None
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    namespace: str | None = None  # None: kubectl's current namespace
    secret: str | None = None
    metrics_secret: str | None = None
    volume: str | None = None
    user: int | None = 1000
    join_timeout_s: int = 1800  # for all pods to connect: they may have to wait for nodes
    keep_finished_s: int = 86400


def join_secret_name(name: str) -> str:
    """Return the name of the Secret with which the pods of a job find each other."""
    return f"{name}-join"


def ranks_of(spec: JobSpec, request: KubernetesRequest) -> int:
    """Return the number of ranks per pod."""
    return spec.ranks or request.gpus_per_node or 1


def shared_memory_bytes_of(request: KubernetesRequest) -> int:
    """Return the shared memory of each pod in bytes."""
    if request.shm_bytes is not None:
        return request.shm_bytes
    return 8 * GiB if request.memory_bytes is None else request.memory_bytes // 2


def check_kubernetes_request(spec: JobSpec, request: KubernetesRequest, kind: Kind) -> None:
    """Raise for requests that the cluster would reject, or accept and never start."""
    _check_names(request, kind)
    _check_amounts(spec, request)
    for name in spec.environment:
        _check_variable(name)
    if redact_command(spec.command) != list(spec.command):
        raise Impossible(
            "the script's arguments contain a secret",
            why="the manifest would expose it to everyone who can read the job",
            fix="pass it as an environment variable, which can be stored in a Secret",
        )
    if kind == "trainjob" and request.metrics_secret is not None:
        raise Impossible(
            "a trainjob cannot have an exporter",
            why="a TrainJob takes its containers from its runtime",
            fix="use --kind jobset, or run muster exporter where the volume is mounted",
        )


def _check_names(request: KubernetesRequest, kind: Kind) -> None:
    if not _LABEL.fullmatch(request.name):
        raise Impossible(
            f"{request.name!r} is not a valid name for a Kubernetes job",
            why="a name has lowercase letters, digits and dashes, begins with a letter and does not end "
            "with a dash",
            fix=f"--name {_nearest_label(request.name)}",
        )
    longest = _longest_name(request, kind)
    if len(longest) > _LONGEST_LABEL:
        over = len(longest) - _LONGEST_LABEL
        raise Impossible(
            f"the name {request.name!r} exceeds the length limit by {over}",
            why=f"its pods would be named {longest}; the limit is {_LONGEST_LABEL} characters",
            fix=f"--name {_nearest_label(request.name[: len(request.name) - over])}",
        )
    names = (
        (request.namespace, "namespace"),
        (request.secret, "Secret"),
        (request.metrics_secret, "Secret"),
        (request.volume, "PersistentVolumeClaim"),
    )
    for value, what in names:
        if value is not None and (not _NAMESPACE.fullmatch(value) or len(value) > _LONGEST_LABEL):
            raise Impossible(
                f"{value!r} is not a valid name for a {what}",
                why=f"a name has at most {_LONGEST_LABEL} lowercase letters, digits and dashes",
                fix=f"kubectl get {what.lower()}s  # lists the existing ones",
            )
    if not request.image or request.image != request.image.strip() or " " in request.image:
        raise Impossible(
            f"{request.image!r} is not a valid image" if request.image else "the image is missing",
            why="the pods need an image that contains torchmuster and the script",
            fix="--image registry/train:1  # docs/kubernetes.md shows how to build one",
        )


def _longest_name(request: KubernetesRequest, kind: Kind) -> str:
    """Return the last pod's name as the cluster builds it; for a Job, only the host name counts."""
    if kind == "job":
        return f"{request.name}-{request.nodes - 1}"
    return f"{request.name}-node-0-{request.nodes - 1}-xxxxx"


def _check_amounts(spec: JobSpec, request: KubernetesRequest) -> None:
    lowest = {
        "nodes": (request.nodes, 1),
        "GPUs per node": (request.gpus_per_node, 0),
        "ranks per node": (spec.ranks, 1),
        "CPUs": (request.cpu, 1),
        "bytes of memory": (request.memory_bytes, 1),
        "bytes of shared memory": (request.shm_bytes, 1),
        "seconds to join": (request.join_timeout_s, 1),
        "as the user's number": (request.user, 1),
        "seconds to keep": (request.keep_finished_s, 0),
    }
    for what, (value, least) in lowest.items():
        if value is not None and value < least:
            raise Impossible(f"invalid value: {value} {what}", fix=f"use at least {least}")
    for what, size in (("memory", request.memory_bytes), ("shm", request.shm_bytes)):
        if size is not None and size < MiB:
            raise Impossible(
                f"--{what} {size} means {size} bytes",
                why="no pod can run with less than 1 MiB",
                fix=f"--{what} {size}GiB",
            )
    if spec.port is not None and not 1024 <= spec.port <= 65535:
        raise Impossible(f"invalid port: {spec.port}", fix="use a port from 1024 to 65535")
    if spec.hosts or spec.gpu_ids:
        raise Impossible(
            "hosts or GPU ids cannot be set for Kubernetes",
            why="the cluster chooses them",
            fix="set their numbers with --nodes and --gpus-per-node",
        )
    if spec.device == "cpu" and request.gpus_per_node:
        raise Impossible(
            f"--device cpu and {request.gpus_per_node} GPUs per pod contradict each other",
            fix="remove --device cpu or --gpus-per-node",
        )
    if spec.device == "gpu" and not request.gpus_per_node:
        raise Impossible(
            "--device gpu is set, but 0 GPUs per pod are requested",
            why="a pod sees only the GPUs that it requests",
            fix="--gpus-per-node 8  # the number of GPUs per node",
        )
    ranks = ranks_of(spec, request)
    if request.gpus_per_node and ranks > request.gpus_per_node:
        raise Impossible(
            f"{ranks} ranks per pod requested, but only {request.gpus_per_node} GPUs per pod",
            why="each rank needs its own GPU",
            fix=f"--ranks {request.gpus_per_node}, or --gpus-per-node {ranks}",
        )
    memory, shared = request.memory_bytes, shared_memory_bytes_of(request)
    if memory is not None and shared > memory:
        raise Impossible(
            f"{format_bytes(shared)} of shared memory requested, but only {format_bytes(memory)} in total",
            why="shared memory counts toward the pod's memory limit, so the pod would be killed "
            "before its shared memory is full",
            fix=f"--memory {format_bytes(2 * shared).replace(' ', '')}, or less shared memory",
        )


def _check_variable(name: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise Impossible(
            f"{name!r} is not a valid variable name",
            why="a name has letters, digits and _, and does not begin with a digit",
        )
    if name.startswith("PET_") or name in ("JOB_COMPLETION_INDEX", *node_group.VARIABLES):
        raise Impossible(
            f"{name} cannot be set for a job in Kubernetes",
            why="the manifest or the cluster uses it to set each pod's node rank",
            fix=f"unset {name}",
        )


def _nearest_label(name: str) -> str:
    tidy = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    return tidy if _LABEL.fullmatch(tidy) else f"job-{tidy}".rstrip("-")
