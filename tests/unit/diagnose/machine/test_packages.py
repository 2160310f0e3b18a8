"""Packages that must fit to torch and to each other: companions, CUDA libraries, NCCL, NumPy."""

import platform
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from site_packages import SitePackages, surroundings
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine import installed, packages
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


@pytest.mark.parametrize(
    ("version", "hardware"),
    [
        ("2.13.0+cu126", "cu126"),
        ("2.5.1+cu121.with.pypi.cudnn", "cu121"),
        ("2.6.0+rocm6.2.4", "rocm6.2.4"),
        ("2.7.0+xpu", "xpu"),
        ("2.6.0a0+ecf3bae40a.nv25.01", ""),
        ("2.1.0a0+cpufix", ""),
        ("2.13.0", ""),
    ],
)
def test_what_hardware_a_version_names(version: str, hardware: str) -> None:
    assert installed.build_of_label(version) == hardware


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


@pytest.mark.parametrize(
    ("torch", "companion"),
    [("2.6.0a0+ecf3bae40a.nv25.01", "0.20.0a0+48b1edf"), ("2.13.0", "0.28.0+cu126")],
)
def test_labels_that_name_no_hardware_are_not_compared(
    site: SitePackages, torch: str, companion: str
) -> None:
    site.torch(torch, cuda="12.8")
    site.add("torchvision", companion)
    assert check(site).status is Status.OK


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


def test_what_another_kind_of_host_needs_is_not_missed(site: SitePackages) -> None:
    site.torch(cuda="12.6", requires=['nvidia-nccl-cu12==2.21.5; platform_machine == "riscv64"'])
    assert check(site).status is Status.OK


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


def test_a_torch_for_windows_without_libuv(site: SitePackages) -> None:
    folder = site.torch("2.13.0")
    found = only(LIBUV.run(surroundings(site, system="win32")))
    assert (found.name, found.status) == ("torch-without-libuv", Status.WARNING)
    assert '$env:USE_LIBUV = "0"' in found.fix
    disabled = surroundings(site, system="win32", environment={"USE_LIBUV": "0"})
    assert list(LIBUV.run(disabled)) == []
    (folder / "lib" / "uv.dll").touch()
    assert list(LIBUV.run(surroundings(site, system="win32"))) == []


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


def test_only_the_package_that_is_imported_counts(site: SitePackages, tmp_path: Path) -> None:
    system = SitePackages(tmp_path / "dist-packages")
    system.add("scipy", "1.11.4")
    site.add("numpy", "2.3.0")
    site.add("scipy", "1.16.0")
    assert check(site, system).status is Status.OK
