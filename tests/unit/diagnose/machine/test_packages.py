"""Packages that must fit to torch and to each other: companions and NumPy."""

from pathlib import Path

import pytest

from site_packages import SitePackages, surroundings
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine import packages
from torchmuster.finding import Finding, Status

(PACKAGES,) = packages.CHECKS


@pytest.fixture
def site(tmp_path: Path) -> SitePackages:
    return SitePackages(tmp_path / "site-packages")


def check(*sites: SitePackages) -> Finding | None:
    findings = list(PACKAGES.run(surroundings(*sites)))
    assert len(findings) <= 1
    return findings[0] if findings else None


def test_this_hosts_packages_match() -> None:
    assert list(PACKAGES.run(Surroundings())) == []


# ---- companions


def test_companions_that_fit(site: SitePackages) -> None:
    site.torch("2.13.0+cu126", cuda="12.6")
    site.add("torchvision", "0.28.0+cu126", requires=["torch==2.13.0"])
    assert check(site) is None


def test_a_companion_of_another_torch(site: SitePackages) -> None:
    site.torch("2.13.0")
    site.add("torchvision", "0.20.0", requires=["torch (==2.5.0)"])
    found = check(site)
    assert found is not None
    assert (found.name, found.status) == ("torch-companion-mismatch", Status.WARNING)
    assert "--force-reinstall torchvision torch==2.13.0" in found.fix


def test_a_companion_for_other_hardware(site: SitePackages) -> None:
    site.torch("2.13.0+cu126", cuda="12.6")
    site.add("torchaudio", "2.13.0+cpu", requires=["torch==2.13.0"])
    found = check(site)
    assert found is not None
    assert found.name == "torch-companion-mismatch"
    assert "cu126" in found.why


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
    assert (found is None) == (status is Status.OK)
    if found is not None:
        assert (found.name, found.status) == ("numpy-abi", status)
        assert found.fix.splitlines()[0] == '/opt/python -m pip install "numpy<2"'
