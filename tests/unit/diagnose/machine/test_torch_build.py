"""Whether the installed torch is whole, and made for this Python and these GPUs."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from device_strategies import gpu, node
from site_packages import ENGINE, SitePackages, surroundings
from torchmuster.devices.model import DeviceKind
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine import torch_build
from torchmuster.diagnose.machine.torch_build import CHECKS
from torchmuster.finding import Finding, Status

WHOLE, HARDWARE = CHECKS


@pytest.fixture
def site(tmp_path: Path) -> SitePackages:
    return SitePackages(tmp_path / "site-packages")


def only(findings: Any) -> Finding:
    (found,) = findings
    assert isinstance(found, Finding)
    return found


# ---- whole


def test_a_whole_torch_is_named(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    site.torch("2.13.0+cu126", cuda="12.6")
    found = only(WHOLE.run(surroundings(site)))
    assert found.status is Status.OK
    assert "2.13.0+cu126" in found.what
    assert found == snapshot


def test_a_torch_below_the_floor(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    site.torch("2.11.0+cu126", cuda="12.6")
    found = only(WHOLE.run(surroundings(site)))
    assert (found.name, found.status) == ("torch-too-old", Status.FAILURE)
    assert found.as_json() == snapshot


def test_this_machine_has_a_whole_torch() -> None:
    assert only(WHOLE.run(Surroundings())).status is Status.OK


def test_torch_that_is_not_there(site: SitePackages) -> None:
    found = only(WHOLE.run(surroundings(site)))
    assert (found.name, found.status) == ("torch-missing", Status.FAILURE)
    assert found.fix == "/opt/python -m pip install torch"


def test_a_library_that_is_missing(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    folder = site.torch()
    (folder / "lib" / "libtorch_cpu.so").unlink()
    found = only(WHOLE.run(surroundings(site)))
    assert (found.name, found.status) == ("torch-broken", Status.FAILURE)
    assert str(folder) in found.what
    assert "torch/lib/libtorch_cpu.so" in found.why
    assert "pip install --force-reinstall torch" in found.fix
    assert found == snapshot


def test_a_library_that_is_cut_short(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    (site.torch() / "lib" / "libtorch_cpu.so").write_text("li")
    found = only(WHOLE.run(surroundings(site)))
    assert found.name == "torch-broken"
    assert "2 B of 7 B" in found.why
    assert found == snapshot


def test_the_compiled_part_is_missing(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    folder = site.torch()
    (site.folder / ENGINE).unlink()
    found = only(WHOLE.run(surroundings(site)))
    assert found.name == "torch-broken"
    assert "torch/_C" in found.why
    assert found.evidence.startswith(ENGINE)
    assert replace(found, evidence="") == snapshot
    assert folder.name in found.what


def test_a_torch_of_another_python(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    site.torch(engine="torch/_C.cpython-38-x86_64-linux-gnu.so")
    found = only(WHOLE.run(surroundings(site)))
    assert found.name == "torch-broken"
    assert "_C.cpython-38-x86_64-linux-gnu.so" in found.why
    here = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    assert here in found.why
    assert replace(found, why=found.why.replace(here, "Python X")) == snapshot


def test_a_file_called_torch(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    (site.folder / "torch.py").write_text("")
    found = only(WHOLE.run(surroundings(site)))
    assert found.name == "module-shadowed"
    assert str(site.folder / "torch.py") in found.what
    assert found == snapshot
    assert found.fix == f"mv {site.folder / 'torch.py'} {site.folder / 'my_torch.py'}"


# ---- hardware


def eight_gpus(*, driver: str = "570.86.15", cuda: str | None = "12.8", **fields: Any) -> Any:
    gpus = [gpu(index, **fields) for index in range(2)]
    return node(*gpus, driver_version=driver, cuda_version=cuda)


def test_a_cpu_build_beside_nvidia_gpus(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    site.torch("2.13.0+cpu")
    found = only(HARDWARE.run(surroundings(site, on=eight_gpus())))
    assert (found.name, found.status) == ("torch-build-without-gpu", Status.FAILURE)
    assert "GPUs 0, 1" in found.why
    assert "pip uninstall -y torch" in found.fix
    assert found == snapshot


def test_a_cuda_build_beside_amd_gpus_is_a_warning(
    site: SitePackages, snapshot: SnapshotAssertion
) -> None:
    site.torch("2.13.0+cu126", cuda="12.6")
    amd = node(gpu(0, kind=DeviceKind.ROCM, name="AMD Instinct MI300X"))
    found = only(HARDWARE.run(surroundings(site, on=amd)))
    assert found.status is Status.WARNING
    assert "pytorch.org" in found.fix
    assert found == snapshot
    assert "pip install torch\n" not in found.fix


def test_a_driver_that_is_too_old(site: SitePackages, snapshot: SnapshotAssertion) -> None:
    site.torch("2.13.0+cu130", cuda="13.0")
    found = only(HARDWARE.run(surroundings(site, on=eight_gpus())))
    assert found.name == "driver-too-old"
    assert "570.86.15" in found.what
    assert "580" in found.fix
    assert found == snapshot


@pytest.mark.parametrize(
    ("cuda", "driver", "serves", "enough"),
    [
        ("12.6", "525.60.13", None, True),
        ("12.6", "525.60.11", None, False),
        ("11.8", "450.80.02", None, True),
        ("13.0", "535.1", "13.0", True),  # beside a compatibility package
        ("99.0", "600.1", None, None),
        ("12.6", None, None, None),
    ],
)
def test_drivers(cuda: str, driver: str | None, serves: str | None, enough: bool | None) -> None:
    assert torch_build.driver_serves(cuda, driver=driver, serves=serves) is enough
