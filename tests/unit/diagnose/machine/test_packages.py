"""Packages that must fit to torch and to each other: companions, CUDA libraries, NCCL, NumPy."""

import platform
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from site_packages import SitePackages, surroundings
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine import packages
from torchmuster.finding import Finding, Status

PACKAGES, LIBUV = packages.CHECKS
HERE = f'platform_system == "Linux" and platform_machine == "{platform.machine()}"'


@pytest.fixture
def site(tmp_path: Path) -> SitePackages:
    return SitePackages(tmp_path / "site-packages")


def only(findings: Any) -> Finding:
    (found,) = findings
    assert isinstance(found, Finding)
    return found


def check(*sites: SitePackages) -> Finding:
    return only(PACKAGES.run(surroundings(*sites)))


def test_this_hosts_packages_match() -> None:
    assert only(PACKAGES.run(Surroundings())).status is Status.OK


# ---- companions


def test_companions_that_fit(site: SitePackages) -> None:
    site.torch("2.13.0+cu126", cuda="12.6")
    site.add("torchvision", "0.28.0+cu126", requires=["torch==2.13.0"])
    found = check(site)
    assert (found.status, found.what) == (Status.OK, "torchvision 0.28.0+cu126")


def test_a_companion_of_another_torch(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    site.torch("2.13.0")
    site.add("torchvision", "0.20.0", requires=["torch (==2.5.0)"])
    found = check(site)
    assert (found.name, found.status) == ("torch-companion-mismatch", Status.WARNING)
    assert "--force-reinstall torchvision torch==2.13.0" in found.fix
    assert found == snapshot


def test_a_companion_for_other_hardware(site: SitePackages) -> None:
    site.torch("2.13.0+cu126", cuda="12.6")
    site.add("torchaudio", "2.13.0+cpu", requires=["torch==2.13.0"])
    found = check(site)
    assert found.name == "torch-companion-mismatch"
    assert "cu126" in found.why


def test_a_cuda_library_that_torch_needs_is_missing(
    site: SitePackages, snapshot: SnapshotAssertion
) -> None:
    site.torch(
        cuda="12.6",
        requires=[f"nvidia-cudnn-cu12==9.5.1.17; {HERE}", f"nvidia-nccl-cu12==2.21.5; {HERE}"],
    )
    site.add("nvidia-nccl-cu12", "2.21.5")
    found = check(site)
    assert (found.name, found.status) == ("cuda-libraries-missing", Status.FAILURE)
    assert found == snapshot
    assert found.fix == "/opt/python -m pip install nvidia-cudnn-cu12==9.5.1.17"


@pytest.mark.parametrize(
    ("package", "status"),
    [("nvidia-cudnn-cu12", Status.WARNING), ("nvidia-nccl-cu12", Status.NOTE)],
)
def test_a_cuda_library_of_another_version(
    site: SitePackages, package: str, status: Status
) -> None:
    site.torch(cuda="12.6", requires=[f"{package}==2.21.5; {HERE}"])
    site.add(package, "2.27.0")
    found = check(site)
    assert (found.name, found.status) == ("cuda-library-version", status)
    assert f"{package} is 2.27.0" in found.what
    assert found.fix == f"/opt/python -m pip install {package}==2.21.5"


# ---- NCCL, libuv


# ---- NumPy


@pytest.mark.parametrize(
    ("numpy", "others", "status"),
    [
        ("2.0.0", {"torch": "2.2.2"}, Status.FAILURE),
        ("2.0.0", {"torch": "2.13.0", "pandas": "2.2.1"}, Status.WARNING),
        ("1.26.4", {"torch": "2.2.2", "pandas": "2.2.1"}, Status.OK),
        ("2.4.6", {"torch": "2.13.0"}, Status.OK),
    ],
)
def test_packages_that_were_compiled_for_numpy_1(
    site: SitePackages, numpy: str, others: dict[str, str], status: Status
) -> None:
    site.add("numpy", numpy)
    for name, version in others.items():
        site.add(name, version)
    found = check(site)
    assert found.status is status
    if status is not Status.OK:
        assert found.name == "numpy-abi"
        assert found.fix.splitlines()[0] == '/opt/python -m pip install "numpy<2"'
