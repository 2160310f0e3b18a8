"""Curves for TensorBoard, written by rank 0: what the trainer measures, and what the GPUs say."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmuster.devices import snapshot
from torchmuster.devices.as_numbers import numbers_of
from torchmuster.devices.visibility import visible
from torchmuster.errors import Impossible
from torchmuster.train.world import World


class Board:
    """Writes named numbers by step; on ranks other than 0, and without a folder, it writes nothing."""

    def __init__(self, folder: Path | None, world: World) -> None:
        self._writer = _writer(folder) if folder is not None and world.is_first else None

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Add a point to each of these curves."""
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, step)

    def write_gpus(self, step: int) -> None:
        """Add a point for each GPU of this machine that the run may see."""
        if self._writer is not None:
            devices = visible(snapshot.take().accelerators, os.environ).devices
            for device in devices:
                self.write(numbers_of(device), step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise Impossible(
            "curves for TensorBoard were asked for, but tensorboard is not installed",
            why=str(error),
            fix="pip install 'torchmuster[tensorboard]', or leave tensorboard_folder out",
        ) from error
    return SummaryWriter(folder)
