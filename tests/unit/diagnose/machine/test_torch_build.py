"""Whether the installed torch is whole, and made for this Python and these GPUs."""

import sys
from pathlib import Path
from typing import Any

import pytest

from device_strategies import gpu, node
from site_packages import ENGINE, SitePackages, surroundings
from torchmuster.devices.model import DeviceKind
from torchmuster.diagnose.check import Surroundings
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


def test_a_whole_torch_is_named(site: SitePackages) -> None:
    site.torch("2.13.0+cu126", cuda="12.6")
    found = only(WHOLE.run(surroundings(site)))
    assert found.status is Status.OK
    assert "2.13.0+cu126" in found.what


def test_a_torch_below_the_floor(site: SitePackages) -> None:
    site.torch("2.11.0+cu126", cuda="12.6")
    found = only(WHOLE.run(surroundings(site)))
    assert (found.name, found.status) == ("torch-too-old", Status.FAILURE)


def test_this_machine_has_a_whole_torch() -> None:
    assert only(WHOLE.run(Surroundings())).status is Status.OK


def test_torch_that_is_not_there(site: SitePackages) -> None:
    found = only(WHOLE.run(surroundings(site)))
    assert (found.name, found.status) == ("torch-missing", Status.FAILURE)
    assert found.fix == "/opt/python -m pip install torch"


def test_the_compiled_part_is_missing(site: SitePackages) -> None:
    folder = site.torch()
    (site.folder / ENGINE).unlink()
    found = only(WHOLE.run(surroundings(site)))
    assert found.name == "torch-broken"
    assert "torch/_C" in found.why
    assert folder.name in found.what


def test_a_torch_of_another_python(site: SitePackages) -> None:
    site.torch(engine="torch/_C.cpython-38-x86_64-linux-gnu.so")
    found = only(WHOLE.run(surroundings(site)))
    assert found.name == "torch-broken"
    assert "_C.cpython-38-x86_64-linux-gnu.so" in found.why
    here = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    assert here in found.why


def test_a_file_called_torch(site: SitePackages) -> None:
    (site.folder / "torch.py").write_text("")
    found = only(WHOLE.run(surroundings(site)))
    assert found.name == "module-shadowed"
    assert str(site.folder / "torch.py") in found.what
    assert found.fix == f"mv {site.folder / 'torch.py'} my_torch.py"


def test_a_file_beside_the_script_called_torch(site: SitePackages, tmp_path: Path) -> None:
    site.torch()
    (tmp_path / "torch.py").touch()
    found = only(WHOLE.run(surroundings(site, folder=tmp_path)))
    assert found.name == "module-shadowed"


# ---- hardware


def eight_gpus(*, driver: str = "570.86.15", cuda: str | None = "12.8", **fields: Any) -> Any:
    gpus = [gpu(index, **fields) for index in range(2)]
    return node(*gpus, driver_version=driver, cuda_version=cuda)


def test_a_cpu_build_beside_nvidia_gpus(site: SitePackages) -> None:
    site.torch("2.13.0+cpu")
    found = only(HARDWARE.run(surroundings(site, on=eight_gpus())))
    assert (found.name, found.status) == ("torch-build-without-gpu", Status.FAILURE)
    assert "GPUs 0, 1" in found.why
    assert "pip uninstall -y torch" in found.fix


def test_a_cuda_build_beside_amd_gpus_is_a_warning(site: SitePackages) -> None:
    site.torch("2.13.0+cu126", cuda="12.6")
    amd = node(gpu(0, kind=DeviceKind.ROCM, name="AMD Instinct MI300X"))
    found = only(HARDWARE.run(surroundings(site, on=amd)))
    assert found.status is Status.WARNING
    assert "pytorch.org" in found.fix


def test_a_driver_that_is_too_old(site: SitePackages) -> None:
    site.torch("2.13.0+cu130", cuda="13.0")
    found = only(HARDWARE.run(surroundings(site, on=eight_gpus())))
    assert found.name == "driver-too-old"
    assert "570.86.15" in found.what
    assert "CUDA 12.8 or older" in found.fix


@pytest.mark.parametrize("serves", ["13.0", "13.2", None])
def test_a_driver_that_serves_this_cuda_or_a_newer_one(
    site: SitePackages, serves: str | None
) -> None:
    site.torch("2.13.0+cu130", cuda="13.0")
    # 535 beside a compatibility package: what the driver reports counts.
    assert list(HARDWARE.run(surroundings(site, on=eight_gpus(driver="535.1", cuda=serves)))) == []
