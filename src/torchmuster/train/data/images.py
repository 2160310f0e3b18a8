"""Folders of images, one subfolder for each class, which ``datasets`` lists and Pillow reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchmuster.errors import Impossible
from torchmuster.train.data.text import import_datasets

INSTALL = "pip install 'torchmuster[images]'"


class ImageFolder(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Images as ``{"pixel_values", "labels"}``, for ``BatchLoader``.

    ``processor`` is the model's image processor; a label is the place of the image's subfolder in
    ``classes``. A file that cannot be read is an error that names it.
    """

    def __init__(self, folder: str, processor: Any, classes: Sequence[str]) -> None:
        datasets = import_datasets("image folders need")
        try:
            rows = datasets.load_dataset(
                "imagefolder",
                data_files={"train": str(Path(folder).expanduser() / "*" / "*")},
                split="train",
                drop_labels=False,
                drop_metadata=True,
            )
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise Impossible(
                f"{folder} has no images",
                why=(str(error).splitlines() or [type(error).__name__])[0],
                fix="put the images of each class into a subfolder of its own",
            ) from error
        self._labels = [list(classes).index(name) for name in rows.features["label"].names]
        self._rows = rows.cast_column("image", datasets.Image(decode=False))
        self._processor = processor

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index]
        image = _read_image(row["image"]["path"])
        pixels = self._processor(images=image, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels[0], "labels": torch.tensor(self._labels[row["label"]])}


def _read_image(path: str) -> Any:
    """Return an image as Pillow's, in RGB."""
    try:
        from PIL import Image
    except ImportError as error:
        raise Impossible(
            "images need Pillow, which is not installed", why=str(error), fix=INSTALL
        ) from error
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise Impossible(
            f"{path} is not an image that Pillow can read",
            why=f"{type(error).__name__}: {error}",
            fix="remove or replace this file",
        ) from error
