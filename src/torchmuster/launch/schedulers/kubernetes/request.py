"""What a job asks of a Kubernetes cluster, and what no cluster would accept."""

import re
from dataclasses import dataclass
from typing import Literal

from torchmuster.errors import Impossible
from torchmuster.launch.job import USUAL_PORT, JobSpec
from torchmuster.redaction import redact_command
from torchmuster.units import GiB, format_bytes

Kind = Literal["trainjob", "job", "jobset"]
GpuResource = Literal["nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/xe"]

# A Service and a TrainJob may not begin with a digit, so the stricter of the two DNS rules holds.
_LABEL = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST_LABEL = 63


@dataclass(frozen=True, kw_only=True)
class KubernetesRequest:
    """The pods of a job: how many, from which image, and what each of them gets.

    The command, the ranks in each pod, the port, the variables and the restarts are the job's own.
    ``cpu`` and ``memory_bytes`` are requested and are the limit too; None leaves them to the cluster.
    Shared memory counts as memory; by default it is half of it, or 8 GiB where none is given.
    ``secret`` names the Secret in which variables with secret names are kept.
    """

    name: str
    image: str
    nodes: int = 1
    gpus_per_node: int = 0
    gpu_resource: GpuResource = "nvidia.com/gpu"
    cpu: int | None = None
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    namespace: str | None = None  # None: the one kubectl is set to
    secret: str | None = None
    run_as_non_root: bool = False
    start_timeout_s: int = 1800  # until all pods have met: they may have to wait for machines
    keep_finished_s: int = 86400


def ranks_of(spec: JobSpec, request: KubernetesRequest) -> int:
    """Return how many ranks each pod runs."""
    return spec.ranks or request.gpus_per_node or 1


def port_of(spec: JobSpec) -> int:
    """Return the port at which the ranks meet."""
    return USUAL_PORT if spec.port is None else spec.port


def shared_memory_bytes_of(request: KubernetesRequest) -> int:
    """Return how much shared memory each pod gets."""
    if request.shm_bytes is not None:
        return request.shm_bytes
    return 8 * GiB if request.memory_bytes is None else request.memory_bytes // 2


def check_kubernetes_request(spec: JobSpec, request: KubernetesRequest, kind: Kind) -> None:
    """Refuse what the cluster would refuse later, or accept and never start."""
    _check_names(request, kind)
    _check_amounts(spec, request)
    for name in spec.environment:
        _check_variable(name)
    if redact_command(spec.command) != list(spec.command):
        raise Impossible(
            "a secret is among the script's arguments",
            why="a manifest would show it to everybody who may see the job",
            fix="give it to the script as a variable, which can be kept in a Secret",
        )
    if kind != "jobset" and spec.max_restarts:
        raise Impossible(
            f"asked for {spec.max_restarts} restarts with a {kind}",
            why="if one rank fails all must start again, and only a JobSet can be told so; a Job "
            "starts single pods again, and a TrainJob leaves it to its runtime",
            fix="--kind jobset, or no restarts",
        )
    if kind == "trainjob" and port_of(spec) != USUAL_PORT:
        raise Impossible(
            f"asked for port {spec.port} with a trainjob",
            why=f"Kubeflow Trainer always uses port {USUAL_PORT}",
            fix="leave the port out, or --kind jobset",
        )


def _check_names(request: KubernetesRequest, kind: Kind) -> None:
    if not _LABEL.fullmatch(request.name):
        raise Impossible(
            f"{request.name!r} cannot be the name of a job in Kubernetes",
            why="a name has small letters, digits and dashes, begins with a letter and does not end "
            "with a dash",
            fix=f"--name {_nearest_label(request.name)}",
        )
    longest = _longest_name(request, kind)
    if len(longest) > _LONGEST_LABEL:
        over = len(longest) - _LONGEST_LABEL
        raise Impossible(
            f"the name {request.name!r} is too long by {over}",
            why=f"its pods would be called {longest}, and {_LONGEST_LABEL} characters are allowed",
            fix=f"--name {_nearest_label(request.name[: len(request.name) - over])}",
        )
    for value, what in ((request.namespace, "namespace"), (request.secret, "Secret")):
        if value is not None and (not _NAMESPACE.fullmatch(value) or len(value) > _LONGEST_LABEL):
            raise Impossible(
                f"{value!r} cannot be the name of a {what}",
                why=f"a name has small letters, digits and dashes, at most {_LONGEST_LABEL}",
                fix=f"kubectl get {what.lower()}s  # shows those there are",
            )
    if not request.image or request.image != request.image.strip() or " " in request.image:
        raise Impossible(
            f"{request.image!r} is not an image" if request.image else "no image was given",
            why="the pods need one with torch and the script in it",
            fix="--image pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime  # or your own",
        )


def _longest_name(request: KubernetesRequest, kind: Kind) -> str:
    """Return the last pod's name as the cluster builds it; of a Job only the host name counts."""
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
        "seconds to start": (request.start_timeout_s, 1),
        "seconds to keep": (request.keep_finished_s, 0),
    }
    for what, (value, least) in lowest.items():
        if value is not None and value < least:
            raise Impossible(f"asked for {value} {what}", fix=f"at least {least}")
    if not 1024 <= port_of(spec) <= 65535:
        raise Impossible(f"asked for port {spec.port}", fix="a port from 1024 to 65535")
    if spec.hosts or spec.gpu_ids:
        raise Impossible(
            "asked for certain hosts or GPUs in Kubernetes",
            why="there the cluster chooses them",
            fix="--nodes and --gpus-per-node say how many",
        )
    if spec.device == "cpu" and request.gpus_per_node:
        raise Impossible(
            f"asked for the CPU and for {request.gpus_per_node} GPUs in each pod",
            fix="leave out --device cpu, or --gpus-per-node",
        )
    if spec.device == "gpu" and not request.gpus_per_node:
        raise Impossible(
            "asked for GPUs, but for none in each pod",
            why="a pod sees only the GPUs it asks for",
            fix="--gpus-per-node 8  # as many as each machine has",
        )
    ranks = ranks_of(spec, request)
    if request.gpus_per_node and ranks > request.gpus_per_node:
        raise Impossible(
            f"asked for {ranks} ranks and {request.gpus_per_node} GPUs in each pod",
            why="each rank needs a GPU of its own",
            fix=f"--ranks {request.gpus_per_node}, or --gpus-per-node {ranks}",
        )
    memory, shared = request.memory_bytes, shared_memory_bytes_of(request)
    if memory is not None and shared > memory:
        raise Impossible(
            f"asked for {format_bytes(shared)} of shared memory and {format_bytes(memory)} in all",
            why="shared memory counts as the pod's memory, which would be killed before it is full",
            fix=f"--memory {format_bytes(2 * shared).replace(' ', '')}, or less shared memory",
        )


def _check_variable(name: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise Impossible(
            f"{name!r} cannot be the name of a variable",
            why="a name has letters, digits and _, and does not begin with a digit",
        )
    if name.startswith("PET_") or name == "JOB_COMPLETION_INDEX":
        raise Impossible(
            f"{name} cannot be set for a job in Kubernetes",
            why="torchrun or the cluster sets it to tell each pod its place",
            fix=f"unset {name}",
        )


def _nearest_label(name: str) -> str:
    tidy = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    return tidy if _LABEL.fullmatch(tidy) else f"job-{tidy}".rstrip("-")
