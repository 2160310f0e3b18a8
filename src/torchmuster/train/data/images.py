"""Folders of images as a map-style dataset, for ``BatchLoader``."""

from typing import Any

import torch

from torchmuster.config.image_folder import ImageFiles, read_image


class ImageFolder(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Images as ``{"pixel_values", "labels"}``; ``processor`` is the model's image processor.

    A file that cannot be read is an error that names it.
    """

    def __init__(self, found: ImageFiles, processor: Any) -> None:
        self.classes = found.classes
        self._files = found.files
        self._processor = processor

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        path, label = self._files[index]
        pixels = self._processor(images=read_image(path), return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels[0], "labels": torch.tensor(label)}
