"""What would run on a machine, as one value that changes when the code does and only then."""

import hashlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchmuster.launch import fingerprint, protocol


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "model").mkdir(parents=True)
    (folder / "train.py").write_text("import model.net\n")
    (folder / "model/net.py").write_text("width = 8\n")
    (folder / "zoo.py").write_text("animals = 2\n")
    (folder / "notes.txt").write_text("hello\n")
    return folder


def take(folder: Path, script: str = "train.py") -> protocol.Fingerprint:
    return fingerprint.take_fingerprint([script, "--epochs", "3"], False, str(folder))


def test_the_fingerprint_of_a_small_project(project: Path) -> None:
    found = take(project)
    assert found.script_sha256 == hashlib.sha256(b"import model.net\n").hexdigest()
    assert len(found.code_sha256) == 64


def test_a_copy_at_another_place_has_the_same_fingerprint(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project, tmp_path / "elsewhere/copy")
    assert take(project) == take(tmp_path / "elsewhere/copy")


def change_a_file(folder: Path) -> None:
    (folder / "zoo.py").write_text("animals = 3\n")


def rename_a_file(folder: Path) -> None:
    (folder / "zoo.py").rename(folder / "park.py")


def add_a_file(folder: Path) -> None:
    (folder / "loss.py").touch()


@pytest.mark.parametrize("change", [change_a_file, rename_a_file, add_a_file])
def test_a_change_beside_the_script_is_seen(project: Path, change: Callable[[Path], None]) -> None:
    before = take(project)
    change(project)
    after = take(project)
    assert after.script_sha256 == before.script_sha256
    assert after.code_sha256 != before.code_sha256


@pytest.mark.parametrize("file", ["notes.txt", "model/net.py"])
def test_other_files_do_not_count(project: Path, file: str) -> None:
    before = take(project)
    (project / file).write_text("changed = True\n")
    assert take(project) == before


def test_a_script_that_is_not_there(project: Path) -> None:
    found = take(project, "trian.py")
    assert found.script_sha256 == ""
    assert take(project / "nowhere").script_sha256 == ""


def test_only_the_folder_of_the_script_counts(project: Path) -> None:
    (project / "scripts").mkdir()
    (project / "scripts/train.py").touch()
    before = take(project, "scripts/train.py")
    change_a_file(project)
    assert take(project, "scripts/train.py") == before
    assert take(project, str(project / "scripts/train.py")) == before


def in_modules(folder: Path, module: str) -> protocol.Fingerprint:
    return fingerprint.take_fingerprint([module], True, str(folder))


def test_a_module_is_found_without_being_imported(project: Path) -> None:
    (project / "model/__init__.py").write_text("raise SystemExit('imported')\n")
    found = in_modules(project, "model.net")
    assert found.script_sha256 == hashlib.sha256(b"width = 8\n").hexdigest()
    assert "model" not in sys.modules
