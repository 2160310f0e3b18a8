"""Steps from data that can only be read in sequence, on one number of ranks."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from torchmuster.errors import Impossible
from torchmuster.train.data.batch_split import split_batch
from torchmuster.train.data.dataloader_adapter import Batch, DataLoaderAdapter
from torchmuster.train.world import World


class StreamLoader(DataLoaderAdapter):
    """Yields each rank's part of each global batch of an iterable dataset.

    A rank reads its own share: that of ``dataset.share(rank, ranks)``, of ``split_dataset_by_node``
    for a Hugging Face stream, else each Nth sample. A position is restored on the same number of
    ranks, by the dataset's ``state_dict`` if it has one, else by skipping samples. The order is the
    dataset's own.

    A rank whose share ends earlier computes a sample with weight 0 until all shares end.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if isinstance(dataset, Iterator):
            raise Impossible(
                f"the data is {type(dataset).__name__}, which can be read only once",
                why="each epoch and each resume reads from the beginning",
                fix="return a dataset with __iter__",
            )
        self.portions = split_batch(
            world.world_size,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
        )
        ranks, whole = world.world_size, self.portions.global_batch_size
        own, rest = divmod(whole, ranks)
        if rest:
            raise Impossible(
                f"a global batch of {whole} samples cannot be divided among {ranks} ranks that read a stream",
                why="each rank reads its own share, and as many samples as the others in each step",
                fix=f"use a multiple of {ranks} as the global batch size, or another number of ranks",
            )
        rounds = self.portions.rounds
        while own % rounds:  # micro-batches of one size, at most the requested one
            rounds += 1
        super().__init__((), world, accumulation=rounds)
        self._sizes = self._sizes._replace(batches=None)
        self._nominal_samples = whole
        self._dataset = dataset
        self._batch_size = own // rounds
        self._collate = collate or getattr(dataset, "collate", None) or default_collate

    def _read(self, begin: tuple[int, int, Any]) -> Iterator[Batch]:
        self._dataloader = Share(
            self._dataset,
            self._world,
            epoch=begin[0],
            batch_size=self._batch_size,
            collate=self._collate,
        )
        return super()._read(begin)


class Share:
    """What one rank reads of an iterable dataset in one epoch, in micro-batches of one size."""

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        epoch: int,
        batch_size: int,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        rank, ranks = world.global_rank, world.world_size
        self._stride = slice(None)
        if hasattr(dataset, "share"):
            dataset = dataset.share(rank, ranks)
        elif is_hugging_face_stream(dataset):
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank, ranks)
        else:
            self._stride = slice(rank, None, ranks)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        self._dataset = dataset
        self._has_state = hasattr(dataset, "state_dict") and self._stride == slice(None)
        self._batch_size = batch_size
        self._collate = collate
        self._batches = 0  # that were read, of a dataset without a state

    def __iter__(self) -> Iterator[Any]:
        samples = islice(iter(self._dataset), self._stride.start, None, self._stride.step)
        samples = islice(samples, self._batches * self._batch_size, None)
        while True:
            batch = list(islice(samples, self._batch_size))
            if not batch:
                return
            if not self._has_state:
                self._batches += 1
            yield self._collate(batch)

    def state_dict(self) -> Any:
        """Return the position after the last batch, as JSON types."""
        return self._dataset.state_dict() if self._has_state else self._batches

    def load_state_dict(self, state: Any) -> None:
        """Continue from a position."""
        if self._has_state:
            self._dataset.load_state_dict(state)
        else:
            self._batches = state


def is_hugging_face_stream(dataset: Any) -> bool:
    """Return whether this is a ``datasets.IterableDataset``."""
    return (
        hasattr(dataset, "num_shards")
        and hasattr(dataset, "shard")
        and not hasattr(dataset, "__len__")
    )
