"""The program of each rank of ``muster bench data``: read with several loader configurations."""

import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from torchmuster.bench.loader import LoaderAnswer, LoaderRequest, Reading
from torchmuster.bench.probes.loader import to_device, visit_all
from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.train.data.loader_factory import loader_for
from torchmuster.train.data.pytree import tensors_in
from torchmuster.train.data.step import Loader
from torchmuster.train.defaults import portions_of
from torchmuster.train.world import World, join_world
from torchmuster.worker.data import batches_of, rows_of, samples_of

_COPIES_TIMED = 15


def measure_reading(request: LoaderRequest, world: World) -> LoaderAnswer:
    """Read with each configuration, on all ranks at the same time."""
    settings = request.settings
    rows = rows_of(settings, world)
    samples = samples_of(settings, rows, world)
    batches = batches_of(settings, world, kept=None).value

    def make(reading: Reading) -> Loader:
        return loader_for(samples, world, replace(batches, workers=reading.workers))

    plain = make(Reading(workers=0))
    portions = portions_of(plain)
    assert portions is not None, "every loader of Muster has portions"
    batch = next(iter(next(plain.epoch(0)))).batch
    ordinary, pinned = to_device(batch, world, rounds=_COPIES_TIMED)
    steps = plain.steps_in_epoch()
    return LoaderAnswer(
        rank=world.global_rank,
        device=str(world.device),
        samples_per_step=max(1, portions.global_batch_size // world.world_size),
        samples_per_batch=portions.micro_batch_size,
        batch_bytes=sum(one.nbytes for one in tensors_in(batch)),
        samples=None if steps is None else len(samples),
        visits=visit_all(request, make, world),
        to_device_s=ordinary,
        pinned_to_device_s=pinned,
    )


def main() -> None:
    """Read the requested data, measure, and write the result."""
    asked, answers = sys.argv[1:]
    request = msgspec.json.decode(Path(asked).read_bytes(), type=LoaderRequest)
    with join_world(request.device) as world:
        found = measure_reading(request, world)
    leave_answer(answers, found.rank, msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
