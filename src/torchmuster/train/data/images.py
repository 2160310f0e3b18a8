"""Folders of images, one subfolder for each class, which ``datasets`` lists and Pillow reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchmuster.errors import Impossible, first_line
from torchmuster.train.data.text import import_datasets


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
            names = rows.features["label"].names
            self._labels = [list(classes).index(name) for name in names]
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise Impossible(
                f"{folder} has no images, or classes that the training data do not have",
                why=f"{first_line(error)}; the classes are {', '.join(classes[:10])}",
                fix="put the images of each class into a subfolder with its name",
            ) from error
        self._rows = rows.cast_column("image", datasets.Image(decode=False))
        self._image = datasets.Image(mode="RGB")
        self._processor = processor

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index]
        try:
            image = self._image.decode_example(row["image"])
        except (OSError, SyntaxError, ValueError, ImportError) as error:
            raise Impossible(
                f"cannot read the image {row['image']['path']}",
                why=f"{type(error).__name__}: {error}",
                fix="remove or replace this file; Pillow is needed: pip install 'torchmuster[images]'",
            ) from error
        pixels = self._processor(images=image, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels[0], "labels": torch.tensor(self._labels[row["label"]])}
