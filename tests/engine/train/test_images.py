"""Folders of images as samples."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from torchmuster.errors import Impossible
from torchmuster.train.data.images import ImageFolder

pytestmark = [pytest.mark.engine, pytest.mark.integrations]


def _process(images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
    assert (images.mode, return_tensors) == ("RGB", "pt")
    return {"pixel_values": torch.tensor([images.size])}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets, tqdm = pytest.importorskip("datasets"), pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # a thread that would be left
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_labels_are_the_places_of_the_subfolders_among_the_classes(tmp_path: Path) -> None:
    folder = tiny_models.make_images(tmp_path / "pics")
    (folder / "cats" / "notes.txt").write_text("no image")
    samples = ImageFolder(str(folder), _process, ("cats", "dogs", "eels"))
    assert [int(samples[place]["labels"]) for place in range(len(samples))] == [
        *([0] * 4),
        *([1] * 4),
        *([2] * 4),
    ]
    assert samples[1]["pixel_values"].tolist() == [21, 24]
    held = tiny_models.make_images(tmp_path / "held", ["eels"])
    assert int(ImageFolder(str(held), _process, ("cats", "dogs", "eels"))[0]["labels"]) == 2
    with pytest.raises(Impossible, match="classes that the training data do not have"):
        ImageFolder(str(held), _process, ("cats", "dogs"))


def test_a_truncated_image_is_named_when_it_is_read(tmp_path: Path) -> None:
    folder = tiny_models.make_images(tmp_path / "pics")
    place = folder / "cats" / "1.jpg"
    place.write_bytes(place.read_bytes()[:-200])
    samples = ImageFolder(str(folder), _process, ("cats", "dogs", "eels"))
    with pytest.raises(Impossible, match=r"cats/1\.jpg"):
        samples[1]
