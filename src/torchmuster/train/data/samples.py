"""Micro-batches of a map-style dataset, and the random numbers that it draws while they are read."""

import random
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset, default_collate, get_worker_info

from torchmuster.train.seeds import derive_seed, seed_process


class SampleRange(NamedTuple):
    """A micro-batch to read: these samples, of which the first ``samples`` count."""

    epoch: int
    indices: list[int]
    samples: int


class MicroBatches:
    """The micro-batches of a dataset, by their :class:`SampleRange`: what a DataLoader's workers read."""

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
        self._tensors = _tensors(dataset) if collate is None else None

    def __getitems__(self, chosen: SampleRange) -> Any:
        """Return the batch of these samples; DataLoader calls this with what its ``batch_sampler`` yields."""
        if get_worker_info() is not None:
            # By the samples, not by the worker: a resumed run draws the same numbers.
            seed_process(derive_seed(self._seed, "batch", chosen.epoch, chosen.indices[0]))
        if self._tensors is not None:
            index = torch.frombuffer(array("q", chosen.indices), dtype=torch.int64)
            return [tensor.index_select(0, index) for tensor in self._tensors]
        if self._random_per_sample:
            return self._collate(self._read_seeded(chosen))
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(chosen.indices))
        return self._collate([self._read(index) for index in chosen.indices])

    def _read(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"while reading sample {index} of {type(self._dataset).__name__}")
            raise

    def _read_seeded(self, chosen: SampleRange) -> list[Any]:
        samples = []
        with _random_states_restored():
            for index in chosen.indices:
                _seed_cpu(derive_seed(self._seed, "sample", chosen.epoch, index))
                samples.append(self._read(index))
        return samples


def _tensors(dataset: Any) -> Sequence[torch.Tensor] | None:
    """Return the tensors of a plain TensorDataset, whose rows can be indexed at once."""
    if type(dataset) is not TensorDataset:
        return None
    for tensor in dataset.tensors:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
    return dataset.tensors


@contextmanager
def _random_states_restored() -> Iterator[None]:
    """Restore the random states of Python, torch (CPU) and numpy afterwards."""
    numpy: Any = sys.modules.get("numpy")
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def _seed_cpu(seed: int) -> None:
    """Seed the random states that datasets use; not the accelerators, which the model uses."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)
