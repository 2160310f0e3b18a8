"""Create the loader for a dataset: map-style, or iterable."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torchmuster.errors import Impossible
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.step import Loader
from torchmuster.train.world import World


def loader_for(samples: Any, world: World, **options: Any) -> Loader:
    """Return the loader for these samples; ``options`` are those that both loaders have."""
    is_iterable = hasattr(samples, "__iter__") or hasattr(samples, "__getitem__")
    if isinstance(samples, DataLoader) or not is_iterable:
        raise Impossible(
            f"the data is a {type(samples).__name__}, but a dataset is needed",
            why="Muster decides which rank reads which samples, and in which order",
            fix="return a torch Dataset or IterableDataset, a Hugging Face dataset, or a list; batch "
            "sizes and workers are settings",
        )
    options["collate"] = getattr(samples, "collate", None)
    has_index = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
    if has_index and not isinstance(samples, IterableDataset):
        return BatchLoader(samples, world, **options)
    from torchmuster.train.data.stream import StreamLoader

    return StreamLoader(samples, world, **options)
