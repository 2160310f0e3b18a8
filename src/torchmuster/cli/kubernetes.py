"""``muster kubernetes``: run a script on a Kubernetes cluster."""

import argparse
import math
import re
from typing import TYPE_CHECKING, Literal

from torchmuster.cli import job_flags, kubernetes_jobs, output, parsers
from torchmuster.cli.scripts import Script
from torchmuster.errors import ExitCode, Impossible
from torchmuster.units import parse_bytes

if TYPE_CHECKING:
    from torchmuster.launch.schedulers.kubernetes.manifests import Document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``render``, ``apply``, ``status``, ``logs`` and ``stop``."""
    parsers.show_examples(
        parser,
        [
            "muster kubernetes apply --image IMAGE --nodes 4 --gpus-per-node 8 train.py    start it",
            "muster kubernetes status train                  its pods, and what is wrong with them",
            "muster kubernetes logs train --follow           the launcher's output",
            "muster kubernetes stop train                    save and stop; apply resumes it",
        ],
    )
    parts = parser.add_subparsers(title="actions", metavar="ACTION")

    render = parsers.add_action(
        parts,
        "render",
        "print the manifests of a job",
        more="The script is a path in the image, which needs torchmuster. The first pod is the launcher, the "
        "others\nconnect to it. Nothing is sent to a cluster: pipe the output to kubectl.",
        usage="muster kubernetes render --image IMAGE [options] script.py [the script's own arguments]",
        examples=[
            "muster kubernetes render --image IMAGE --nodes 4 --gpus-per-node 8 train.py | kubectl apply -f -",
            "muster kubernetes render --kind trainjob --image IMAGE --nodes 2 train.py --lr 1e-4",
            "muster kubernetes render --image IMAGE --volume runs -- muster train --config config.yaml",
        ],
    )
    _add_job_flags(render)
    render.set_defaults(run=_render)

    apply = parsers.add_action(
        parts,
        "apply",
        "create a job in the cluster, or resume one that was stopped",
        more="Also creates the Secret with which its pods join the launcher. "
        "Needs: pip install 'torchmuster[kubernetes]'",
        usage="muster kubernetes apply --image IMAGE [options] script.py [the script's own arguments]",
        examples=[
            "muster kubernetes apply --image IMAGE --nodes 4 --gpus-per-node 8 train.py",
            "muster kubernetes apply --image IMAGE --volume runs -- muster train --config config.yaml",
        ],
    )
    _add_job_flags(apply)
    kubernetes_jobs.add_context_flag(apply)
    apply.set_defaults(run=_apply)
    kubernetes_jobs.add_actions(parts)


def _add_job_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind",
        choices=("job", "jobset", "trainjob"),
        default="job",
        help="an Indexed Job with its Service, a JobSet, or Kubeflow's TrainJob (default: job)",
    )
    parser.add_argument("--image", required=True, help="the container image")
    parser.add_argument("--name", help="name of the job (default: the script's name)")
    parser.add_argument(
        "--namespace", help="namespace of the job (default: kubectl's current namespace)"
    )
    pods = parser.add_argument_group("each pod")
    pods.add_argument(
        "--nodes", type=job_flags.count, default=1, metavar="N", help="number of pods (default: 1)"
    )
    pods.add_argument(
        "--gpus-per-node", type=job_flags.count, default=0, metavar="N", help="GPUs per pod"
    )
    pods.add_argument(
        "--gpu-resource",
        choices=("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/xe"),
        default="nvidia.com/gpu",
        help="resource name of the GPUs (default: nvidia.com/gpu)",
    )
    pods.add_argument(
        "--ranks",
        type=job_flags.count,
        metavar="N",
        help="processes per pod (default: one per GPU)",
    )
    pods.add_argument("--cpu", type=job_flags.count, metavar="N", help="CPU cores per pod")
    pods.add_argument(
        "--memory", type=_kubernetes_size, metavar="SIZE", help="memory per pod, such as 64GiB"
    )
    pods.add_argument(
        "--shm",
        type=_kubernetes_size,
        metavar="SIZE",
        help="size of /dev/shm (default: half of --memory, or 8GiB)",
    )
    pods.add_argument(
        "--secret", metavar="NAME", help="Kubernetes Secret that holds the secret variables"
    )
    pods.add_argument(
        "--volume",
        metavar="CLAIM",
        help="PersistentVolumeClaim for the run folder and its checkpoints, shared by all pods (default: none: "
        "what is not saved elsewhere ends with its pod)",
    )
    pods.add_argument(
        "--user",
        type=_user,
        default=1000,
        metavar="UID",
        help="numeric user of the pods, or: image, for the image's own (default: 1000)",
    )
    pods.add_argument(
        "--metrics-secret",
        metavar="NAME",
        help="serve metrics from each pod, with token and tls.pem of this Secret (default: no exporter)",
    )
    pods.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable on all ranks; NAME alone forwards its current value",
    )
    parser.add_argument(
        "--port", type=job_flags.port, metavar="N", help="rendezvous port (default: 29400)"
    )
    parser.add_argument(
        "--max-restarts",
        type=_kubernetes_restarts,
        default=job_flags.USUAL_RESTARTS,
        metavar="N",
        help="restart all ranks after a failure, at most N times without a newer checkpoint "
        f"(default: {job_flags.USUAL_RESTARTS})",
    )
    parser.add_argument(
        "--grace",
        type=job_flags.duration,
        default=30.0,
        metavar="DURATION",
        help="time for the ranks to save after SIGTERM, as when a node is drained (default: 30s)",
    )
    parser.add_argument(
        "--join-timeout",
        type=job_flags.duration,
        default=1800.0,
        metavar="DURATION",
        help="fail if not all pods run and have connected after DURATION (default: 30m)",
    )
    parser.set_defaults(command=None)


def _render(options: argparse.Namespace) -> int:
    from torchmuster.launch.schedulers.kubernetes.manifests import secret_command, to_yaml

    documents = _manifests(options)
    if options.nodes > 1:
        command = secret_command(documents[-1]["metadata"]["name"], options.namespace)
        output.print_text(f"# Once, before the first start: {command}")
    output.print_text(to_yaml(documents), end="")
    return ExitCode.GOOD


def _apply(options: argparse.Namespace) -> int:
    manifests = _manifests(options)
    return kubernetes_jobs.apply_manifests(options, manifests)


def _manifests(options: argparse.Namespace) -> "list[Document]":
    """Return the objects of the job that the flags describe."""
    from torchmuster.launch.job import JobSpec, Limits
    from torchmuster.launch.schedulers.kubernetes.manifests import render_manifests
    from torchmuster.launch.schedulers.kubernetes.request import KubernetesRequest

    script, subcommand = _script(options)
    if subcommand == "train" and options.volume is None:
        output.say(
            "muster: without --volume, checkpoints in the run folder end with their pod; "
            "to keep them: --volume CLAIM, or checkpoint.folder in object storage"
        )
    script_name = script.name if subcommand == "run" else "train"
    name = options.name or re.sub(r"[^a-z0-9]+", "-", script_name.lower()).strip("-")
    spec = JobSpec(
        name=name,
        command=script.command,
        module=script.module,
        folder="",
        ranks=options.ranks,
        port=options.port,
        max_restarts=options.max_restarts,
        environment=job_flags.named_variables(options.env),
        limits=Limits(grace_s=options.grace),
    )
    request = KubernetesRequest(
        name=name,
        image=options.image,
        subcommand=subcommand,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        gpu_resource=options.gpu_resource,
        cpu=options.cpu,
        memory_bytes=options.memory,
        shm_bytes=options.shm,
        namespace=options.namespace,
        secret=options.secret,
        metrics_secret=options.metrics_secret,
        volume=options.volume,
        user=options.user,
        join_timeout_s=math.ceil(options.join_timeout),
    )
    return render_manifests(spec, request, options.kind)


def _script(options: argparse.Namespace) -> "tuple[Script, Literal['run', 'train']]":
    """Return the script, or the arguments of ``muster train``."""
    words = list(options.command or [])
    if words[:2] == ["muster", "train"]:
        return Script(command=tuple(words[2:]), module=False), "train"
    words = words[2:] if words[:2] == ["muster", "run"] else words
    module = words[:1] == ["-m"]
    words = words[1:] if module else words
    if not words or words[0].startswith("-"):
        raise Impossible(
            "there is no script to run",
            why="a script is a path in the image that ends in .py, or a module after -m; flags of muster run are flags "
            f"of muster kubernetes {options.words[1]}",
            fix=f"muster kubernetes {options.words[1]} --image IMAGE train.py, or: … -- muster train --config config.yaml",
        )
    return Script(command=tuple(words), module=module), "run"


def _user(text: str) -> int | None:
    if text == "image":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a user's number of at least 1, or image")
    return int(text)


def _kubernetes_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _kubernetes_restarts(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of restarts")
    return int(text)
