"""Folders of images: their classes and files, and what is found wrong before a run starts."""

from pathlib import Path

import pytest

import tiny_models
from torchmuster.config.here import check_here
from torchmuster.config.image_folder import check_first_images, find_images, read_image
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import ConfigError, Impossible

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tiny_models.make_images(tmp_path / "pics")


def test_classes_are_the_subfolders_in_alphabetical_order(folder: Path) -> None:
    (folder / "dogs" / ".DS_Store").write_text("")
    (folder / "dogs" / "more").mkdir()
    (folder / "dogs" / "0.png").rename(folder / "dogs" / "more" / "UPPER.PNG")
    (folder / "README.md").write_text("")
    found = find_images("pics")
    assert found.classes == ("cats", "dogs", "eels")
    assert [number for _, number in found.files] == [0] * 4 + [1] * 4 + [2] * 4
    assert "pics/dogs/more/UPPER.PNG" in [path for path, _ in found.files]
    check_first_images(found)
    assert {read_image(path).mode for path, _ in found.files} == {"RGB"}


def test_evaluation_has_the_numbers_of_the_training_classes(folder: Path) -> None:
    tiny_models.make_images(folder.parent / "held", ["eels"])
    held = find_images("held", classes=("cats", "dogs", "eels"))
    assert {number for _, number in held.files} == {2}
    with pytest.raises(Impossible, match="'eels'"):
        find_images("held", classes=("cats", "dogs"))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("pics/cats/notes.txt", "pics/cats/notes.txt"),
        ("pics/loose.png", "pics/loose.png"),
        ("pics/cats/0.png", "pics/cats/0.png"),
        ("pics/fish/.hidden", "pics/fish"),
    ],
)
def test_a_file_that_is_no_image_is_named_before_ranks_start(
    folder: Path, wrong: str, named: str
) -> None:
    Path(wrong).parent.mkdir(exist_ok=True)
    Path(wrong).write_text("no image")
    Path("c.yaml").write_text("data: {images: pics}\n")
    with pytest.raises(ConfigError) as error:
        check_here(resolve_settings(file=Path("c.yaml")))
    (mistake,) = error.value.mistakes
    assert named in mistake.what
    assert mistake.where.startswith("c.yaml:1")


def test_a_truncated_image_is_named_when_it_is_read(folder: Path) -> None:
    place = folder / "cats" / "1.jpg"
    place.write_bytes(place.read_bytes()[:-200])
    with pytest.raises(Impossible, match=r"cats/1\.jpg"):
        read_image(str(place))


def test_a_folder_needs_two_classes(folder: Path) -> None:
    (folder.parent / "one" / "cats").mkdir(parents=True)
    with pytest.raises(Impossible, match="1 subfolder,"):
        find_images("one")
    with pytest.raises(Impossible, match="not found"):
        find_images("nowhere")
