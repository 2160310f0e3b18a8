"""What the pods of a manifest would run is run here: one process for each pod, as a kubelet starts it.

There is no cluster; the names of pods are replaced by this machine's address, all else is as rendered.
"""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ranks.conftest import Python, Ran
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.kubernetes.manifests import first_address, render_manifests
from torchmuster.launch.schedulers.kubernetes.request import Kind, KubernetesRequest

pytestmark = pytest.mark.ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_ddp.py"
REQUEST = KubernetesRequest(name="train", image="torch", nodes=2)


def expanded(word: str, environment: dict[str, str]) -> str:
    """Expand $(NAME) and $$ in an argument as Kubernetes does."""

    def one(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match["name"], match[0])

    return re.sub(r"\$\$|\$\((?P<name>[^)]*)\)", one, word)


def run_pods(python: Python, spec: JobSpec, kind: Kind) -> list[Ran]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    manifest = render_manifests(spec, REQUEST, kind)[-1]["spec"]

    def pod(index: int) -> Ran:
        variables = {"JOB_COMPLETION_INDEX": str(index)}
        container: dict[str, Any] = (
            manifest.get("trainer") or (manifest["template"]["spec"]["containers"][0])
        )
        if kind == "trainjob":  # what Kubeflow Trainer adds
            variables |= {
                "PET_NNODES": str(container["numNodes"]),
                "PET_NPROC_PER_NODE": str(container["numProcPerNode"]),
                "PET_NODE_RANK": str(index),
                "PET_MASTER_ADDR": first_address(REQUEST, kind),
                "PET_MASTER_PORT": "29400",
            }
        variables |= {one["name"]: expanded(one["value"], variables) for one in container["env"]}
        here = {first_address(REQUEST, kind): "127.0.0.1", "29400": str(port)}
        for name, value in here.items():
            variables = {key: text.replace(name, value) for key, text in variables.items()}
        words = [expanded(word, variables) for word in container["args"]]
        for name, value in here.items():
            words = [word.replace(name, value) for word in words]
        assert container["command"] == ["torchrun"]
        return python("-m", "torch.distributed.run", *words, env=variables)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(pod, range(2)))


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_an_ordinary_script_trains_in_two_pods(python: Python, kind: Kind) -> None:
    command = (str(EXAMPLE), "--epochs", "1", "--samples", "1024")
    first, second = run_pods(python, JobSpec(name="train", command=command, folder="."), kind)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert re.fullmatch(r"epoch 0 loss \d\.\d+ ranks 2\n", first.out)
    assert second.out == ""


def test_what_the_user_wrote_reaches_the_script_as_it_was(python: Python, tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], os.environ['NOTE'])\n")
    command = (str(script), "$(JOB_COMPLETION_INDEX)", "$HOME", "5$", "a b'\"")
    spec = JobSpec(name="x", command=command, folder=".", environment={"NOTE": "$(X) $$ $"})
    for ran in run_pods(python, spec, "job"):
        assert ran.code == 0, ran.err
        assert ran.out == f"{list(command[1:])} $(X) $$ $\n"
