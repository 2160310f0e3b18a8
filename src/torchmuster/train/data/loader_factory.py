"""Create the loader for a dataset: map-style, or iterable."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torchmuster.errors import Impossible
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.step import Loader
from torchmuster.train.world import World


def loader_for(
    samples: Any,
    world: World,
    *,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    **options: Any,
) -> Loader:
    """Return the loader for these samples; ``options`` are further ones of :class:`BatchLoader`."""
    if isinstance(samples, DataLoader):
        raise Impossible(
            "the data is a DataLoader, but a dataset is needed",
            why="Muster decides which rank reads which samples, and in which order",
            fix="return the dataset of the DataLoader; batch sizes and workers are settings",
        )
    sizes: Any = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
    collate = getattr(samples, "collate", None)
    has_index = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
    if has_index and not isinstance(samples, IterableDataset):
        return BatchLoader(samples, world, collate=collate, **sizes, **options)
    if not hasattr(samples, "__iter__"):
        raise Impossible(
            f"the data is {type(samples).__name__}, which is not a dataset",
            why="a dataset has len() and [index], or is iterable",
            fix="return a torch Dataset or IterableDataset, a Hugging Face dataset, or a list",
        )
    from torchmuster.train.data.stream import StreamLoader

    return StreamLoader(samples, world, **sizes)
