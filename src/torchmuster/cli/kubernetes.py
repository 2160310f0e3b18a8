"""``muster kubernetes``: print a script as a Kubernetes Job."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import jobs, output
from torchmuster.cli.options import ScriptOptions, command, count, flag
from torchmuster.errors import ExitCode, Impossible
from torchmuster.units import parse_seconds

if TYPE_CHECKING:
    from torchmuster.launch.schedulers.kubernetes import PodsRequest


def restarts(text: str) -> int:
    """Parse a number of restarts."""
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a number of restarts")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions(ScriptOptions):
    """The flags of ``muster kubernetes``."""

    image: str = flag("the container image", default="", required=True)
    name: str | None = flag("name of the job (default: the script's name)")
    nodes: int = flag("number of pods (default: 1)", default=1, parse=count, metavar="N")
    gpus_per_node: int = flag("GPUs per pod", default=0, parse=count, metavar="N")
    ranks: int | None = flag("processes per pod (default: one per GPU)", parse=count, metavar="N")
    max_restarts: int = flag(
        "restart all ranks after a failure, at most N times without a newer checkpoint "
        f"(default: {jobs.USUAL_RESTARTS})",
        default=jobs.USUAL_RESTARTS,
        parse=restarts,
        metavar="N",
    )
    grace: float = flag(
        "time for the ranks to save after SIGTERM, as when a node is drained (default: 30s)",
        default=30.0,
        parse=parse_seconds,
        metavar="DURATION",
    )


@command(
    KubernetesOptions,
    usage=("muster kubernetes --image IMAGE [options] script.py [the script's own arguments]"),
    more="""
    Print a script as an Indexed Job with its headless Service, for any cluster.
    The script is a path in the image, which needs torchmuster. Volumes, variables, memory and all else: edit the YAML.
    """,
    examples=[
        "muster kubernetes --image IMAGE --nodes 4 --gpus-per-node 8 train.py --lr 1e-4 > job.yaml",
        "muster kubernetes --image IMAGE train.py | kubectl apply -f -",
        "muster kubernetes --image IMAGE --nodes 2 muster train --config config.yaml",
    ],
)
def run(options: KubernetesOptions) -> int:
    """Print the manifests and return the exit code."""
    from torchmuster.launch.schedulers.kubernetes import render_job, secret_command

    request = _request(options)
    manifest = render_job(request)
    if request.nodes > 1:
        output.print_text(f"# Once, before the first start: {secret_command(request)}")
    output.print_text(manifest, end="")
    return ExitCode.GOOD


def _request(options: KubernetesOptions) -> "PodsRequest":
    from torchmuster.launch.schedulers.kubernetes import PodsRequest

    command = list(options.script)
    is_train = command[:2] == ["muster", "train"]
    if is_train:
        command = command[2:]
        script_name = "train"
    else:
        script_name = _script_name(command)
    name = re.sub(r"[^a-z0-9]+", "-", script_name.lower()).strip("-")
    return PodsRequest(
        name=options.name or name,
        image=options.image,
        command=tuple(command),
        subcommand="train" if is_train else "run",
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        ranks=options.ranks,
        max_restarts=options.max_restarts,
        grace_s=options.grace,
    )


def _script_name(command: list[str]) -> str:
    if command[:1] == ["-m"] and len(command) > 1:
        return command[1].rpartition(".")[2]
    if not command or command[0].startswith("-") or command[0] == "muster":
        raise Impossible(
            "there is no script to run",
            why="a script is a path in the image that ends in .py, or a module after -m",
            fix="muster kubernetes --image IMAGE train.py, or: … muster train --config config.yaml",
        )
    return Path(command[0]).stem
