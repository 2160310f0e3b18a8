"""Folders of images: their classes, and what is found wrong before a run starts."""

from pathlib import Path

import pytest

import tiny_models
from torchmuster.config.here import check_here
from torchmuster.config.image_folder import image_classes
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import ConfigError

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tiny_models.make_images(tmp_path / "pics")


def test_classes_are_the_subfolders_in_alphabetical_order(folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / "README.md").write_text("")
    assert image_classes("pics") == ("cats", "dogs", "eels")


def test_a_folder_without_classes_is_named_before_ranks_start(folder: Path) -> None:
    (folder / "cats" / "inner.txt").write_text("")
    Path("c.yaml").write_text("data: {images: pics, evaluation: pics/cats}\n")
    with pytest.raises(ConfigError) as error:
        check_here(resolve_settings(file=Path("c.yaml")))
    (mistake,) = error.value.mistakes
    assert "pics/cats" in mistake.what
    assert mistake.where.startswith("c.yaml:1")
