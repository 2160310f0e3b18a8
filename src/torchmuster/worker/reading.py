"""The ranks of ``muster bench data``: read the data of the settings with several numbers of workers."""

import ctypes
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from torchmuster.bench.result import Row
from torchmuster.config.settings import Settings
from torchmuster.errors import Impossible
from torchmuster.train.data.loader_factory import loader_for
from torchmuster.train.data.pytree import tensors_in
from torchmuster.train.data.step import Loader, MicroBatch
from torchmuster.train.seeds import seed_process
from torchmuster.train.world import World, all_gather_object, join_world
from torchmuster.worker.data import batches_of, samples_of, text_of

COMPARED_BATCHES = 4
FEWEST_SAMPLES, MOST_SAMPLES = 3, 40


def measure(
    device: str, settings: dict[str, Any], workers: Sequence[int], seconds: float = 1.0
) -> list[Row]:
    """Read with each number of workers on all ranks at once, each for about ``seconds``.

    A sample is the time of one batch on the slowest rank. The first batches must be the same with
    every number of workers.
    """
    typed = msgspec.convert(settings, Settings)
    rows = []
    expected = ""
    with join_world("cpu" if device == "cpu" else "auto") as world:
        samples = samples_of(typed, text_of(typed, world, None), None, world)
        batches = batches_of(typed, world, resumed=None)
        for count in workers:
            seed_process(0)  # a data set without workers draws from this generator
            loader = loader_for(samples, world, **{**batches, "workers": count})
            row, content = read(loader, count, world, seconds)
            expected = expected or content
            row.figures["different"] = float(content != expected)
            rows.append(row)
    return rows


def read(loader: Loader, workers: int, world: World, seconds: float) -> tuple[Row, str]:
    """Return the row of one loader, and a hash of its first batches."""
    begun_s = time.perf_counter()
    batches = endless(loader)
    first = next(batches)
    start_s = time.perf_counter() - begun_s
    content = hashlib.sha256()
    for micro in (first, *(next(batches) for _ in range(COMPARED_BATCHES - 1))):
        update_hash(content, micro.batch)
    group = max(1, workers)  # the workers deliver in turns, so a sample has a batch of each

    def time_group() -> float:
        begun_s = time.perf_counter()
        for _ in range(group):
            next(batches)
        taken_s = (time.perf_counter() - begun_s) / group
        return max(float(rank_s) for rank_s in all_gather_object(taken_s, world))

    time_group()  # prefetched while the first batches were hashed
    number = round(seconds / (group * time_group()))
    number = min(max(number, FEWEST_SAMPLES), MOST_SAMPLES)
    seconds_per_batch = tuple(time_group() for _ in range(number))
    close = getattr(loader, "close", None)
    batches.close()
    if close is not None:
        close()
    figures = {"samples": float(first.samples * world.world_size), "start_s": start_s}
    return Row(
        labels={"workers": workers}, seconds=seconds_per_batch, figures=figures
    ), content.hexdigest()


def endless(loader: Loader) -> Any:
    """Yield the micro-batches of one epoch after the other."""
    epoch = 0
    while True:
        empty = True
        for micro in micro_batches(loader, epoch):
            empty = False
            yield micro
        if empty:
            raise Impossible("the data has no samples", fix="check the source of its samples")
        epoch += 1


def micro_batches(loader: Loader, epoch: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of an epoch."""
    for step in loader.epoch(epoch):
        yield from step


def update_hash(content: Any, batch: Any) -> None:
    """Add the bytes of a batch's tensors to a hash."""
    for tensor in tensors_in(batch):
        own = tensor.detach().cpu().contiguous()
        content.update(f"{own.dtype} {tuple(own.shape)}".encode())
        if own.nbytes:
            content.update(ctypes.string_at(own.data_ptr(), own.nbytes))
