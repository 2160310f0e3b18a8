"""The image of deploy/Dockerfile, built with podman on a Debian root file system, without a package registry."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS = ("podman", "runc", "debootstrap")
# As ../shared/recipes/podlab.sh found it: crun refuses the hybrid cgroup mode, and default limits are refused.
CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
"""
_WITHIN_S = 1200

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(
        not all(map(shutil.which, NEEDS)) or os.geteuid() != 0,
        reason=f"apt-get install {' '.join(NEEDS)} netavark aardvark-dns catatonit, as root",
    ),
    pytest.mark.timeout(2 * _WITHIN_S),
]


def call(*words: object, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Build the base image, the wheels and the product's image; remove both images at the end."""
    work = tmp_path_factory.mktemp("image")
    (work / "containers.conf").write_text(CONF)
    environment = {"CONTAINERS_CONF": str(work / "containers.conf")}
    base, name = f"localhost/base-{os.getpid()}:1", f"localhost/torchmuster-{os.getpid()}:1"
    root = work / "root"
    include = "--include=python3,python3-venv,ca-certificates"
    call("debootstrap", "--variant=minbase", include, "bookworm", root)
    call("tar", "-C", root, "-cf", work / "root.tar", ".")
    shutil.rmtree(root)
    call("podman", "import", work / "root.tar", base, **environment)
    (work / "root.tar").unlink()
    context = work / "context"
    (context / "deploy").mkdir(parents=True)
    shutil.copy(ROOT / "deploy/Dockerfile", context / "deploy")
    wheels = context / "dist"
    pip = (sys.executable, "-m", "pip")
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT)
    # The CPU build that is installed here: torch's own wheel for GPUs has 5 GB.
    (wheel,) = wheels.glob("torchmuster-*.whl")
    call(*pip, "download", "-q", "-d", wheels, "torch==2.13.0", wheel)
    flags = "--no-index --find-links /tmp/dist"
    arguments = ("--build-arg", f"BASE={base}", "--build-arg", f"PIP_FLAGS={flags}")
    file = context / "deploy/Dockerfile"
    call("podman", "build", "-f", file, "-t", name, *arguments, context, **environment)
    yield name, environment
    call("podman", "rmi", "-f", name, base, **environment)


def in_image(image: tuple[str, dict[str, str]], *words: str) -> str:
    name, environment = image
    return call("podman", "run", "--rm", "--network", "none", name, *words, **environment)


def test_the_user_has_no_root_rights_and_the_doctor_runs(image: tuple[str, dict[str, str]]) -> None:
    assert in_image(image, "id", "-un").strip() == "muster"
    checks = json.loads(in_image(image, "muster", "doctor", "--json"))
    assert checks


def test_two_ranks_train_inside(image: tuple[str, dict[str, str]]) -> None:
    script = (
        "import torch, torch.distributed as dist\\n"
        "dist.init_process_group('gloo')\\n"
        "total = torch.tensor([dist.get_rank() + 1]); dist.all_reduce(total)\\n"
        "print('sum', total.item()); dist.destroy_process_group()\\n"
    )
    run = f'printf "{script}" > sum.py && muster run --device cpu --ranks 2 sum.py'
    assert "sum 3" in in_image(image, "bash", "-c", run)
