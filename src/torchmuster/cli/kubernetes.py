"""``muster kubernetes``: print a script as a Kubernetes Job."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchmuster.cli import output
from torchmuster.cli.options import ScriptOptions, command, count, flag
from torchmuster.errors import ExitCode, Impossible

if TYPE_CHECKING:
    from torchmuster.launch.schedulers.kubernetes import PodsRequest


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions(ScriptOptions):
    """The flags of ``muster kubernetes``."""

    image: str = flag("the container image", default="", required=True)
    name: str | None = flag("name of the job (default: the script's name)")
    nodes: int = flag("number of pods (default: 1)", default=1, parse=count, metavar="N")
    gpus_per_node: int = flag("GPUs per pod", default=0, parse=count, metavar="N")


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
    """Return what to print; ``muster train`` in front of its flags trains from settings in the image."""
    from torchmuster.launch.schedulers.kubernetes import PodsRequest

    command = list(options.script)
    subcommand: Literal["run", "train"] = "run"
    script = command[0] if command else ""
    if command[:2] == ["muster", "train"]:
        subcommand = "train"
        command = command[2:]
        script = "train"
    elif script == "-m" and len(command) > 1:
        script = command[1].rpartition(".")[2]
    elif not script.endswith(".py"):
        raise Impossible(
            "there is no script to run",
            why="a script is a path in the image that ends in .py, or a module after -m",
            fix="muster kubernetes --image IMAGE train.py, or: … muster train --config config.yaml",
        )
    name = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")
    return PodsRequest(
        name=options.name or name,
        image=options.image,
        command=tuple(command),
        subcommand=subcommand,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
    )
