"""The ranks of ``muster bench data``: read the data of the settings with several numbers of workers."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from torchmuster.bench.result import Row
from torchmuster.config.settings import Settings
from torchmuster.errors import Impossible
from torchmuster.train.data.loader_factory import loader_for
from torchmuster.train.data.step import Loader, MicroBatch
from torchmuster.train.world import World, all_gather_object, join_world
from torchmuster.worker.data import batches_of, samples_of, text_of

WARM_UP_GROUPS = 3
FEWEST_SAMPLES, MOST_SAMPLES = 3, 40


def measure(
    device: str, settings: dict[str, Any], workers: Sequence[int], seconds: float = 1.0
) -> list[Row]:
    """Read with each number of workers on all ranks at once, each for about ``seconds``.

    A sample is the time of one batch on the slowest rank.
    """
    typed = msgspec.convert(settings, Settings)
    rows = []
    with join_world("cpu" if device == "cpu" else "auto") as world:
        samples = samples_of(typed, text_of(typed, world, None), None, world)
        batches = batches_of(typed, world, resumed=None)
        for count in workers:
            loader = loader_for(samples, world, **{**batches, "workers": count})
            rows.append(read(loader, count, world, seconds))
    return rows


def read(loader: Loader, workers: int, world: World, seconds: float) -> Row:
    """Return the row of one loader."""
    begun_s = time.perf_counter()
    batches = endless(loader)
    first = next(batches)
    start_s = time.perf_counter() - begun_s
    group = max(1, workers)  # the workers deliver in turns, so a sample has a batch of each

    def time_group() -> float:
        begun_s = time.perf_counter()
        for _ in range(group):
            next(batches)
        taken_s = (time.perf_counter() - begun_s) / group
        return max(float(rank_s) for rank_s in all_gather_object(taken_s, world))

    for _ in range(WARM_UP_GROUPS):  # these were prefetched
        first_s = time_group()
    number = min(max(round(seconds / (group * first_s)), FEWEST_SAMPLES), MOST_SAMPLES)
    seconds_per_batch = tuple(time_group() for _ in range(number))
    batches.close()
    close = getattr(loader, "close", None)
    if close is not None:
        close()
    figures = {"samples": float(first.samples * world.world_size), "start_s": start_s}
    return Row(labels={"workers": workers}, seconds=seconds_per_batch, figures=figures)


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
