"""Iterable datasets of Hugging Face as a source: their shards are read independently."""

from collections.abc import Iterable
from typing import Any

from torchmuster.train.data.streams.iterable import LANES, Iterables


class HuggingFaceStream(Iterables):
    """A ``datasets.IterableDataset``; a map-style ``datasets.Dataset`` belongs into ``BatchLoader``.

    The dataset's own shards are what ranks divide; where they are fewer than ``lanes``, each shard is
    dealt out sample by sample. Datasets that were shuffled with a buffer are brought back to a position by
    reading from the beginning, all others by their own state.
    """

    def __init__(self, dataset: Any, *, lanes: int = LANES) -> None:
        super().__init__(dataset)
        self._dataset = dataset
        self._shards = dataset.num_shards
        self._ways = -(-lanes // self._shards)

    def identity(self) -> str:
        """Return what the dataset calls itself."""
        name = self._dataset.info.dataset_name or "dataset"
        return f"{name} {self._dataset.split}: {self._shards} shards in {self.lanes()} lanes"

    def _open(self, shard: int, epoch: int, state: Any) -> Iterable[Any]:
        part = self._dataset.shard(num_shards=self._shards, index=shard, contiguous=False)
        part.set_epoch(epoch)
        if not _state_is_exact(part):
            return _FromTheBeginning(part)
        if state is not None:
            part.load_state_dict(state)
        return part  # type: ignore[no-any-return]


def _state_is_exact(dataset: Any) -> bool:
    """Say whether the dataset's own state brings it back to a position.

    By its documentation it does not where there is a shuffle buffer, whose content is lost, and where
    tables are mapped in batches. Neither shows in the state or anywhere public, so the steps that the
    dataset is made of are looked at; without those, it is read from the beginning.
    """
    steps = getattr(dataset, "_ex_iterable", None)
    layout = getattr(dataset, "_formatting", None)
    if steps is None or getattr(layout, "is_table", False):
        return False
    waiting = [steps]
    while waiting:
        step = waiting.pop()
        if "Shuffled" in type(step).__name__:
            return False
        inner = getattr(step, "ex_iterables", None) or [getattr(step, "ex_iterable", None)]
        waiting += [one for one in inner if one is not None]
    return True


class _FromTheBeginning:
    """An iterable without a state of its own."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        return iter(self._samples)
