"""The image of deploy/Dockerfile, built with podman on a Debian root file system, without a package registry."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pods.images import ROOT
from pods.podman import INSTALL, LABEL, NEEDS, Podman, lab_name, remove_abandoned, remove_lab

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(
        not all(map(shutil.which, [*NEEDS, "debootstrap"])) or os.geteuid() != 0,
        reason=f"{INSTALL} debootstrap, as root",
    ),
    pytest.mark.timeout(2400),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Podman, str]]:
    """Build the base image, the wheels and the product's image; remove both images at the end."""
    work = tmp_path_factory.mktemp("image")
    podman, lab = Podman(work), lab_name()
    remove_abandoned(podman)
    try:
        yield podman, product_image(podman, lab, work)
    finally:
        remove_lab(podman, lab)


def product_image(podman: Podman, lab: str, work: Path) -> str:
    """Build deploy/Dockerfile on a Debian root file system, without a package registry."""
    base, name = f"localhost/{lab}:base", f"localhost/{lab}:product"
    root = work / "root"
    include = "--include=python3,python3-venv,ca-certificates"
    call("debootstrap", "--variant=minbase", include, "bookworm", root)
    call("tar", "-C", root, "-cf", work / "root.tar", ".")
    shutil.rmtree(root)
    podman("import", "--change", f"LABEL={LABEL}={lab}", work / "root.tar", base)
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
    podman("build", "-f", file, "-t", name, "--label", f"{LABEL}={lab}", *arguments, context)
    shutil.rmtree(context)
    return name


def call(*words: object) -> None:
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def in_image(image: tuple[Podman, str], *words: str) -> str:
    podman, built = image
    return podman("run", "--rm", "--network", "none", built, *words)


def test_the_user_has_no_root_rights_and_the_doctor_runs(image: tuple[Podman, str]) -> None:
    assert in_image(image, "id", "-un").strip() == "muster"
    checks = json.loads(in_image(image, "muster", "doctor", "--json"))
    assert checks


def test_two_ranks_train_inside(image: tuple[Podman, str]) -> None:
    script = (
        "import torch, torch.distributed as dist\\n"
        "dist.init_process_group('gloo')\\n"
        "total = torch.tensor([dist.get_rank() + 1]); dist.all_reduce(total)\\n"
        "print('sum', total.item()); dist.destroy_process_group()\\n"
    )
    run = f'printf "{script}" > sum.py && muster run --device cpu --ranks 2 sum.py'
    assert "sum 3" in in_image(image, "bash", "-c", run)
