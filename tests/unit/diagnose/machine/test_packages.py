"""Packages that must fit to torch and to each other: companions, CUDA libraries, NCCL, NumPy."""

import platform
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from site_packages import SitePackages, surroundings
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine import (
    collective_libraries,
    installed,
    numpy_abi,
    torch_companions,
)
from torchmuster.finding import Finding, Status

(COMPANIONS,) = torch_companions.CHECKS
(NUMPY,) = numpy_abi.CHECKS
NCCL, LIBUV = collective_libraries.CHECKS
HERE = f'platform_system == "Linux" and platform_machine == "{platform.machine()}"'


@pytest.fixture
def site(tmp_path: Path) -> SitePackages:
    return SitePackages(tmp_path / "site-packages")


def only(findings: Any) -> Finding:
    (found,) = findings
    assert isinstance(found, Finding)
    return found


# ---- what is read


def test_requirements_without_extras_and_without_the_description(site: SitePackages) -> None:
    site.add(
        "A_b.c", "1.0", requires=["numpy (<2,>=1.21)", 'x==1; extra == "dev"', "torch[cuda]==2.1"]
    )
    (package,) = installed.packages(surroundings(site))
    assert package.name == "a-b-c"
    needs = {need.name: need for need in package.requirements()}
    assert set(needs) == {"numpy", "torch"}
    assert needs["numpy"].below == (2,)
    assert needs["torch"].pinned == "2.1"


@pytest.mark.parametrize(
    ("version", "numbers", "label"),
    [("2.13.0+cpu", (2, 13, 0), "cpu"), ("2.8.0a0", (2, 8, 0), ""), ("x", (), "")],
)
def test_versions(version: str, numbers: tuple[int, ...], label: str) -> None:
    assert (installed.release(version), installed.local_label(version)) == (numbers, label)


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


# ---- companions


def test_companions_that_fit(site: SitePackages) -> None:
    site.torch("2.13.0+cu126", cuda="12.6")
    site.add("torchvision", "0.28.0+cu126", requires=["torch==2.13.0"])
    found = only(COMPANIONS.run(surroundings(site)))
    assert (found.status, found.what) == (Status.OK, "torchvision 0.28.0+cu126")


def test_a_companion_of_another_torch(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    site.torch("2.13.0")
    site.add("torchvision", "0.20.0", requires=["torch (==2.5.0)"])
    found = only(COMPANIONS.run(surroundings(site)))
    assert (found.name, found.status) == ("torch-companion-mismatch", Status.WARNING)
    assert found.fix.endswith("--force-reinstall torchvision torch==2.13.0")
    assert found == snapshot


def test_a_companion_for_other_hardware(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    site.torch("2.13.0+cu126", cuda="12.6")
    site.add("torchaudio", "2.13.0+cpu", requires=["torch==2.13.0"])
    found = only(COMPANIONS.run(surroundings(site)))
    assert "--force-reinstall torchaudio torch==2.13.0" in found.fix
    assert "cu126" in found.why
    assert found == snapshot


def test_a_companion_of_a_torch_that_somebody_built(
    site: SitePackages, snapshot: SnapshotAssertion
) -> None:
    site.torch("2.6.0a0+ecf3bae40a.nv25.01", cuda="12.8")
    site.add("torchvision", "0.15.0", requires=["torch==2.0.0"])
    found = only(COMPANIONS.run(surroundings(site)))
    assert "pip" not in found.fix
    assert found == snapshot


def test_labels_that_name_no_hardware_are_not_compared(site: SitePackages) -> None:
    site.torch("2.6.0a0+ecf3bae40a.nv25.01", cuda="12.8")
    site.add("torchvision", "0.20.0a0+48b1edf")
    assert only(COMPANIONS.run(surroundings(site))).status is Status.OK


def test_a_build_that_does_not_say_what_it_is_for_is_believed(site: SitePackages) -> None:
    site.torch("2.13.0", cuda="12.6")
    site.add("torchaudio", "2.13.0+cu126", requires=["torch==2.13.0"])
    assert only(COMPANIONS.run(surroundings(site))).status is Status.OK


def test_a_cuda_library_that_torch_needs_is_missing(
    site: SitePackages, snapshot: SnapshotAssertion
) -> None:
    site.torch(
        cuda="12.6",
        requires=[f"nvidia-cudnn-cu12==9.5.1.17; {HERE}", f"nvidia-nccl-cu12==2.21.5; {HERE}"],
    )
    site.add("nvidia-nccl-cu12", "2.21.5")
    found = only(COMPANIONS.run(surroundings(site)))
    assert (found.name, found.status) == ("cuda-libraries-missing", Status.FAILURE)
    assert "nvidia-cudnn-cu12" in found.what
    assert found == snapshot
    assert found.fix == "/opt/python -m pip install nvidia-cudnn-cu12==9.5.1.17"


def test_what_another_kind_of_machine_needs_is_not_missed(site: SitePackages) -> None:
    site.torch(cuda="12.6", requires=['nvidia-nccl-cu12==2.21.5; platform_machine == "riscv64"'])
    assert only(COMPANIONS.run(surroundings(site))).status is Status.OK


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("nvidia-cudnn-cu12", "8.9.0", Status.WARNING),
        ("nvidia-nccl-cu12", "2.27.0", Status.NOTE),
        ("nvidia-nccl-cu12", "2.18.0", Status.WARNING),
    ],
)
def test_a_cuda_library_of_another_version(
    site: SitePackages, package: str, version: str, status: Status, snapshot: SnapshotAssertion
) -> None:
    site.torch(cuda="12.6", requires=[f"{package}==2.21.5; {HERE}"])
    site.add(package, version)
    found = only(COMPANIONS.run(surroundings(site)))
    assert (found.name, found.status) == ("cuda-library-version", status)
    assert f"{package} is {version}" in found.what
    assert found == snapshot
    assert found.fix == f"/opt/python -m pip install {package}==2.21.5"


# ---- NCCL, libuv


def test_one_nccl(site: SitePackages) -> None:
    site.torch(cuda="12.6")
    site.add("nvidia-nccl-cu12", "2.21.5")
    found = only(NCCL.run(surroundings(site)))
    assert (found.status, found.what) == (Status.OK, "NCCL 2.21.5, gloo")


def test_two_nccls_in_one_place(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    site.torch(cuda="12.6")
    site.add("nvidia-nccl-cu11", "2.19.3")
    site.add("nvidia-nccl-cu12", "2.21.5")
    found = only(NCCL.run(surroundings(site)))
    assert (found.name, found.status) == ("two-nccl", Status.WARNING)
    assert "pip uninstall -y nvidia-nccl-cu11\n" in found.fix
    assert found.fix.endswith("--no-deps nvidia-nccl-cu12==2.21.5")
    assert found == snapshot


def test_nccl_does_not_matter_to_a_cpu_build(site: SitePackages) -> None:
    site.torch("2.13.0+cpu")
    site.add("nvidia-nccl-cu11", "2.19.3")
    site.add("nvidia-nccl-cu12", "2.21.5")
    found = only(NCCL.run(surroundings(site)))
    assert (found.status, found.what) == (Status.OK, "gloo")


def test_a_torch_for_windows_without_libuv(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    folder = site.torch("2.5.0")
    found = only(LIBUV.run(surroundings(site, system="win32")))
    assert (found.name, found.status) == ("torch-without-libuv", Status.WARNING)
    assert '$env:USE_LIBUV = "0"' in found.fix
    assert "set USE_LIBUV=0" in found.fix
    assert found == snapshot
    told = surroundings(site, system="win32", environment={"USE_LIBUV": "0"})
    assert list(LIBUV.run(told)) == []
    (folder / "lib" / "uv.dll").touch()
    assert list(LIBUV.run(surroundings(site, system="win32"))) == []


# ---- NumPy


def test_numpy_is_named(site: SitePackages) -> None:
    site.torch()
    site.add("numpy", "2.4.6")
    found = only(NUMPY.run(surroundings(site)))
    assert (found.status, found.what) == (Status.OK, "NumPy 2.4.6")


def test_this_machines_numpy_is_well() -> None:
    assert only(NUMPY.run(Surroundings())).status is Status.OK


def test_no_numpy_is_worth_a_note(site: SitePackages) -> None:
    site.torch()
    found = only(NUMPY.run(surroundings(site)))
    assert (found.name, found.status) == ("numpy-missing", Status.NOTE)
    assert found.fix == "/opt/python -m pip install numpy"


def test_numpy_2_beside_a_torch_that_was_compiled_for_numpy_1(
    site: SitePackages, snapshot: SnapshotAssertion
) -> None:
    site.torch("2.2.2")
    site.add("numpy", "2.0.0")
    found = only(NUMPY.run(surroundings(site)))
    assert (found.name, found.status) == ("numpy-abi", Status.FAILURE)
    assert "torch 2.2.2" in found.what
    assert found == snapshot
    assert found.fix.splitlines()[0] == '/opt/python -m pip install "numpy<2"'


def test_numpy_2_beside_an_old_pandas_is_a_warning(site: SitePackages) -> None:
    site.torch("2.13.0")
    site.add("numpy", "2.0.0")
    site.add("pandas", "2.2.1")
    found = only(NUMPY.run(surroundings(site)))
    assert (found.name, found.status) == ("numpy-abi", Status.WARNING)
    assert "pandas 2.2.1" in found.what


def test_numpy_1_is_right_for_old_packages(site: SitePackages) -> None:
    site.torch("2.2.2")
    site.add("numpy", "1.26.4")
    site.add("pandas", "2.2.1")
    assert only(NUMPY.run(surroundings(site))).status is Status.OK


def test_a_package_that_says_numpy_is_too_new_for_it(
    site: SitePackages, snapshot: SnapshotAssertion
) -> None:
    site.torch()
    site.add("numpy", "2.3.0")
    site.add("numba", "0.61", requires=["numpy<2.3,>=1.24"])
    site.add("other", "1.0", requires=['numpy<2; python_version < "3.9"'])
    found = only(NUMPY.run(surroundings(site)))
    assert (found.name, found.status) == ("numpy-too-new", Status.NOTE)
    assert "numba 0.61" in found.what
    assert "pip install --upgrade numba" in found.fix
    assert found == snapshot


def test_what_a_package_that_is_not_taken_says_of_numpy_does_not_count(
    site: SitePackages, tmp_path: Path
) -> None:
    system = SitePackages(tmp_path / "dist-packages")
    system.add("scipy", "1.11.4", requires=["numpy<1.28,>=1.21.6"])
    site.torch()
    site.add("numpy", "2.3.0")
    site.add("scipy", "1.16.0", requires=["numpy<2.6,>=1.25.2"])
    assert only(NUMPY.run(surroundings(site, system))).status is Status.OK
