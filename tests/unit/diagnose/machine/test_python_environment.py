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


def test_packages_where_they_were_installed(site: SitePackages) -> None:
    found = only(IMPORTS.run(surroundings(site)))
    assert (found.status, found.what) == (Status.OK, f"packages in {site.folder}")


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


def test_the_source_of_torch_is_left_where_it_is(site: SitePackages, tmp_path: Path) -> None:
    (tmp_path / "pytorch" / "torch" / "csrc").mkdir(parents=True)
    (tmp_path / "pytorch" / "torch" / "__init__.py").touch()
    found = only(IMPORTS.run(surroundings(site, folder=tmp_path / "pytorch")))
    assert found.fix.startswith("cd ..")


def test_a_folder_without_code_does_not_stand_in_the_way(
    site: SitePackages, tmp_path: Path
) -> None:
    (tmp_path / "work" / "torch").mkdir(parents=True)
    assert only(IMPORTS.run(surroundings(site, folder=tmp_path / "work"))).status is Status.OK


def test_the_working_folder_may_be_where_torch_is_installed(site: SitePackages) -> None:
    assert only(IMPORTS.run(surroundings(site, folder=site.folder))).status is Status.OK


def test_two_versions_one_from_pythonpath(
    site: SitePackages, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    old = SitePackages(tmp_path / "old")
    old.torch("2.1.0")
    here = surroundings(old, site, environment={"PYTHONPATH": f"/x:{old.folder}"})
    found = only(IMPORTS.run(here))
    assert (found.name, found.status) == ("module-twice", Status.WARNING)
    assert str(old.folder) in found.what
    assert "PYTHONPATH" in found.why
    assert found == snapshot
    assert found.fix == "unset PYTHONPATH"


def test_two_versions_one_of_the_users_own(site: SitePackages, tmp_path: Path) -> None:
    own = SitePackages(tmp_path / ".local/lib/python3.11/site-packages")
    own.torch("2.1.0")
    found = only(IMPORTS.run(surroundings(own, site, environment={"HOME": str(tmp_path)})))
    assert found.fix == "export PYTHONNOUSERSITE=1"


def test_a_virtual_environment_before_the_systems_packages_is_a_note(
    site: SitePackages, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    own = SitePackages(tmp_path / "venv/lib/python3.11/site-packages")
    own.torch("2.12.0")
    (tmp_path / "venv/pyvenv.cfg").write_text("include-system-site-packages = true\n")
    found = only(IMPORTS.run(surroundings(own, site)))
    assert (found.name, found.status) == ("module-twice", Status.NOTE)
    assert found == snapshot
    assert found.fix == ""


def test_two_versions_in_one_virtual_environment_are_a_warning(
    site: SitePackages, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    own = SitePackages(tmp_path / "a")
    own.torch("2.12.0")
    (tmp_path / "pyvenv.cfg").touch()
    found = only(IMPORTS.run(surroundings(own, site)))
    assert found.status is Status.WARNING
    assert found.fix.startswith("/opt/python -m pip uninstall torch")
    assert found == snapshot


def test_the_same_version_twice_is_no_matter(site: SitePackages, tmp_path: Path) -> None:
    again = SitePackages(tmp_path / "again")
    again.torch("2.13.0+cpu")
    assert only(IMPORTS.run(surroundings(again, site))).status is Status.OK


def test_this_machines_imports_are_well(tmp_path: Path) -> None:
    assert only(IMPORTS.run(Surroundings(folder=tmp_path))).status is Status.OK
