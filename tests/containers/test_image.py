"""The image of deploy/Dockerfile, built with podman on a Debian root file system, without a package registry."""

import json
import os
import shutil
from collections.abc import Iterator

import pytest

from pods.images import Image, product_image
from pods.podman import INSTALL, NEEDS, Podman, lab_name, remove_abandoned, remove_lab

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(
        not all(map(shutil.which, [*NEEDS, "debootstrap"])) or os.geteuid() != 0,
        reason=f"{INSTALL} debootstrap, as root",
    ),
    pytest.mark.timeout(2400),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Podman, Image]]:
    """Build the base image, the wheels and the product's image; remove both images at the end."""
    work = tmp_path_factory.mktemp("image")
    podman, lab = Podman(work), lab_name()
    remove_abandoned(podman)
    try:
        yield podman, product_image(podman, lab, work)
    finally:
        remove_lab(podman, lab)


def in_image(image: tuple[Podman, Image], *words: str) -> str:
    podman, built = image
    return podman("run", "--rm", "--network", "none", built.name, *words)


def test_the_user_has_no_root_rights_and_the_doctor_runs(image: tuple[Podman, Image]) -> None:
    assert in_image(image, "id", "-un").strip() == "muster"
    checks = json.loads(in_image(image, "muster", "doctor", "--json"))
    assert checks


def test_two_ranks_train_inside(image: tuple[Podman, Image]) -> None:
    script = (
        "import torch, torch.distributed as dist\\n"
        "dist.init_process_group('gloo')\\n"
        "total = torch.tensor([dist.get_rank() + 1]); dist.all_reduce(total)\\n"
        "print('sum', total.item()); dist.destroy_process_group()\\n"
    )
    run = f'printf "{script}" > sum.py && muster run --device cpu --ranks 2 sum.py'
    assert "sum 3" in in_image(image, "bash", "-c", run)
