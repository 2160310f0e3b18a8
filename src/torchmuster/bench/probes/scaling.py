"""A rank that times training steps with the others, and the same steps without communication.

As a program: ``python -m torchmuster.bench.probes.scaling REQUEST ANSWERS``.
"""

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from torchmuster.bench.probes.clock import interleaved_on_ranks
from torchmuster.bench.scaling import ScalingRequest, ScalingStudy, ScalingTimes, StepTimes
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.probes.build_step import BuiltStep, build_step, optimizer_of
from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.loader_factory import LoaderSpec, loader_for
from torchmuster.train.data.step import Loader, MicroBatch, Step
from torchmuster.train.models import factory
from torchmuster.train.step import TrainStep
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.train.world import World, join_world
from torchmuster.units import KiB

_MADE_UP_SAMPLES = 512  # synthetic samples if only the row length is known
_FIRST_CALLS = 3  # in which workers start
_SMALL_BYTES = 4 * KiB


class ScalingSteps:
    """Runs steps of one portion, and records the data loading time of each."""

    def __init__(self, built: BuiltStep, loader: Loader) -> None:
        self._built = built
        self._loader = loader
        self._steps = itertools.chain.from_iterable(map(loader.epoch, itertools.count()))
        self.read_s: list[float] = []

    def take(self) -> None:
        """Run one whole step."""
        built = self._built
        begun_s = time.perf_counter()
        step = next(self._steps)
        self.read_s.append(time.perf_counter() - begun_s)
        step = dataclasses.replace(step, micro_batches=self._timed(step))
        for micro in built.update.accumulate(step):
            loss, count = built.loss_of(micro.batch)
            built.update.backward(loss, count)
        built.update.apply()

    def close(self) -> None:
        """Stop prefetching."""
        if isinstance(self._loader, BatchLoader):
            self._loader.close()

    def _timed(self, step: Step) -> Iterator[MicroBatch]:
        micro_batches = iter(step)
        while True:
            begun_s = time.perf_counter()
            micro = next(micro_batches, None)
            self.read_s[-1] += time.perf_counter() - begun_s
            if micro is None:
                return
            yield micro


def step_times(asked: ScalingRequest, world: World) -> ScalingTimes:
    """Time the steps; called on all ranks."""
    study = asked.study
    if study.threads is not None:
        torch.set_num_threads(study.threads)
    turns: dict[str, Callable[[], object]] = {}
    all_steps: dict[str, ScalingSteps] = {}
    together = _build(study, world)
    alone = together if world.world_size == 1 else _alone(study, world)
    sent_bytes = sum(one.nbytes for one in together.model.parameters() if one.requires_grad)
    for portion in asked.portions:
        kinds = {"alone": alone} if alone is together else {"step": together, "alone": alone}
        for kind, built in kinds.items():
            steps = ScalingSteps(built, _loader(study, built, portion, number=world.global_rank))
            all_steps[f"{kind} {portion}"] = steps
            turns[f"{kind} {portion}"] = steps.take
    for size_bytes in _sizes(sent_bytes) if world.world_size > 1 else ():
        turns[f"send {size_bytes}"] = _sending(size_bytes, world)
    taken_s = interleaved_on_ranks(turns, world=world, rounds=study.rounds)
    for steps in all_steps.values():
        steps.close()
    return ScalingTimes(
        rank=world.global_rank,
        device=str(world.device),
        backend=world.backend,
        sent_bytes=sent_bytes,
        shards=sum(isinstance(one, FSDPModule) for one in together.model.modules()),
        by_portion={
            portion: StepTimes(
                step_s=taken_s.get(f"step {portion}", taken_s[f"alone {portion}"]),
                alone_s=taken_s[f"alone {portion}"],
                read_s=statistics.median(all_steps[f"alone {portion}"].read_s[_FIRST_CALLS:]),
            )
            for portion in asked.portions
        },
        messages_s={
            int(name.removeprefix("send ")): samples
            for name, samples in taken_s.items()
            if name.startswith("send ")
        },
    )


def _build(study: ScalingStudy, world: World) -> BuiltStep:
    ranks = world.world_size
    sharded = study.strategy == "fsdp"
    candidate = Candidate(
        strategy="single" if ranks == 1 else study.strategy,
        layout=ShardLayout(copies=1 if sharded else ranks, shards=ranks if sharded else 1),
        precision=study.precision,
    )
    return build_step(study.work, candidate, world)


def _alone(study: ScalingStudy, world: World) -> BuiltStep:
    """Return a training run with this rank's computation but without communication."""
    solo = dataclasses.replace(world, world_size=1, local_world_size=1, global_rank=0, local_rank=0)
    candidate = Candidate(
        strategy="single", layout=ShardLayout(copies=1, shards=1), precision=study.precision
    )
    built = build_step(study.work, candidate, solo)
    if study.strategy != "fsdp":
        return built
    # An FSDP rank updates only its shard: update the same number of parameters.
    trained = [one for one in built.model.parameters() if one.requires_grad]
    enough = sum(one.numel() for one in trained) / world.world_size
    before = itertools.accumulate((one.numel() for one in trained), initial=0)
    part = [one for one, so_far in zip(trained, before, strict=False) if so_far < enough]
    optimizer = optimizer_of(study.work)(part)
    update = TrainStep(
        *(built.model, optimizer, built.strategy, solo),
        precision=built.precision,
        clip_norm=study.work.clip_norm,
    )
    return dataclasses.replace(built, optimizer=optimizer, update=update)


def _loader(study: ScalingStudy, built: BuiltStep, portion: int, *, number: int) -> Loader:
    """Return the loader with this many samples per rank; ranks read different samples."""
    world = built.world
    batches = LoaderSpec(
        global_batch_size=portion * world.world_size,
        micro_batch_size=min(study.micro_batch_size or portion, portion),
        seed=number if world.world_size == 1 else 0,
        workers=study.workers,
    )
    samples = _samples(study.work, built)
    if hasattr(samples, "__getitem__") and hasattr(samples, "__len__"):
        # Whole steps only: a smaller last step would distort the measurement.
        return BatchLoader(samples, world, drop_tail=True, **vars(batches))
    return loader_for(samples, world, batches)


def _samples(work: Work, built: BuiltStep) -> Any:
    if work.dataset is not None:
        return factory.call_import(work.dataset, "data.dataset")
    made_up = [built.batch() for _ in range(_MADE_UP_SAMPLES)]
    return [{name: value[0].cpu() for name, value in one.items()} for one in made_up]


def _sizes(sent_bytes: int) -> tuple[int, ...]:
    return tuple(sorted({_SMALL_BYTES, max(sent_bytes // 8, _SMALL_BYTES), sent_bytes}))


def _sending(size_bytes: int, world: World) -> Callable[[], object]:
    message = torch.ones(max(1, size_bytes // 4), device=world.device).zero_()
    return lambda: dist.all_reduce(message)


def main(request: str, answers: str) -> None:
    """Read the request, run the steps, and write the answer."""
    asked = msgspec.json.decode(Path(request).read_bytes(), type=ScalingRequest)
    with join_world("cpu" if asked.study.device == "cpu" else "auto") as world:
        found = step_times(asked, world)
        leave_answer(answers, found.rank, msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
