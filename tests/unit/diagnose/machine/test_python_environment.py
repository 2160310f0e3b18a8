"""Which Python this is, and whether it imports the packages that were installed."""

from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from site_packages import SitePackages, surroundings
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine import python_environment
from torchmuster.finding import Finding, Status

(IMPORTS,) = python_environment.CHECKS


def only(findings: Any) -> Finding:
    (found,) = findings
    assert isinstance(found, Finding)
    return found


# ---- imports


@pytest.fixture
def site(tmp_path: Path) -> SitePackages:
    site = SitePackages(tmp_path / "site-packages")
    site.torch("2.13.0+cpu")
    return site


@pytest.mark.parametrize("file", ["torch.py", "torch/__init__.py"])
def test_a_file_beside_the_script_that_is_called_torch(
    site: SitePackages, file: str, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    folder = tmp_path / "work"
    (folder / file).parent.mkdir(parents=True)
    (folder / file).touch()
    taken = folder / file.partition("/")[0]
    found = only(IMPORTS.run(surroundings(site, folder=folder)))
    assert (found.name, found.status) == ("module-shadowed", Status.FAILURE)
    assert str(taken) in found.what
    assert found == snapshot
    assert found.fix == f"mv {taken} {folder / f'my_{taken.name}'}"


def test_this_machines_imports_are_well(tmp_path: Path) -> None:
    assert only(IMPORTS.run(Surroundings(folder=tmp_path))).status is Status.OK
