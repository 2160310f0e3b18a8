"""Reads one micro-batch of a map-style dataset, in the training process or in a loader's worker."""

import random
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset, default_collate

from torchmuster.train.seeds import derive


class Portion(NamedTuple):
    """A micro-batch to be read: these samples, of which the first ``samples`` count."""

    epoch: int
    indices: list[int]
    samples: int


class Reader:
    """Turns a portion into a batch."""

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any] | None,
        seed: int,
        random_per_sample: bool,
    ) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate
        self._seed = seed
        self._random_per_sample = random_per_sample
        self._tensors = _whole_tensors(dataset) if collate is None else None

    def read(self, portion: Portion) -> Any:
        """Return the batch of these samples."""
        if self._tensors is not None:
            index = torch.frombuffer(array("q", portion.indices), dtype=torch.int64)
            return [tensor.index_select(0, index) for tensor in self._tensors]
        if self._random_per_sample:
            return self._collate(self._with_own_random_numbers(portion))
        many = getattr(self._dataset, "__getitems__", None)
        return self._collate((many or self._one_by_one)(portion.indices))

    def _one_by_one(self, indices: Sequence[int]) -> list[Any]:
        samples = []
        dataset = self._dataset
        for index in indices:
            try:
                samples.append(dataset[index])
            except Exception as error:
                error.add_note(f"while reading sample {index} of {type(dataset).__name__}")
                raise
        return samples

    def _with_own_random_numbers(self, portion: Portion) -> list[Any]:
        samples = []
        with random_numbers_kept():
            for index in portion.indices:
                seed_cpu(derive(self._seed, "sample", portion.epoch, index))
                samples += self._one_by_one([index])
        return samples


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Give Python, torch (CPU) and numpy back the random state that they had before."""
    numpy = sys.modules.get("numpy")
    python, torchs = random.getstate(), torch.get_rng_state()
    numpys = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torchs)
        if numpy and numpys is not None:
            numpy.random.set_state(numpys)


def seed_cpu(seed: int) -> None:
    """Seed what datasets draw from; not the accelerators, whose numbers are the model's."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _whole_tensors(dataset: Any) -> Sequence[torch.Tensor] | None:
    """Return the tensors of a plain TensorDataset: rows are taken at once, with the same result."""
    if type(dataset) is not TensorDataset:
        return None
    simple = all(
        one.device.type == "cpu" and one.layout == torch.strided for one in dataset.tensors
    )
    return dataset.tensors if simple else None
