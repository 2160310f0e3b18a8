"""A rank that runs real steps of a plan and reports their memory and time.

Memory is tracked in the first steps and time is measured in the later ones: on the CPU, tracking
slows a step down.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from torchmuster.plan.probes.build_step import BuiltStep, build_step
from torchmuster.plan.probes.live_storage import Look, tensor_memory
from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.plan.proof.verification import FOLLOWED, RankSteps, RealSteps
from torchmuster.train.world import World, join_world


def real_steps(steps: RealSteps, world: World) -> RankSteps:
    """Run the steps, on all ranks."""
    with tensor_memory(world.device) as look:
        built = build_step(steps.work, steps.candidate, world, blocks=steps.blocks)
        peaks = tuple(_peak(look, partial(built.train, number)) for number in range(FOLLOWED))
    step_s = tuple(_real_steps_timed(built, FOLLOWED + number) for number in range(steps.timed))
    reserved = None
    if world.device.type != "cpu":
        reserved = int(torch.accelerator.max_memory_reserved(world.device))
    return RankSteps(
        rank=world.global_rank,
        device=str(world.device),
        peaks_bytes=peaks,
        reserved_bytes=reserved,
        step_s=step_s,
        loss=_real_steps_loss(built),
    )


def _peak(look: Look, work: Callable[[], object]) -> int:
    """Run a function and return the peak of tensor memory on the device meanwhile."""
    look()
    work()
    return look().peak_bytes


def _real_steps_timed(built: BuiltStep, number: int) -> float:
    device = built.world.device
    if built.world.world_size > 1:
        dist.barrier()  # so that no rank's time includes waiting for others to start
    begun_s = time.perf_counter()
    built.train(number)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begun_s


def _real_steps_loss(built: BuiltStep) -> float:
    """Return the mean loss of one more micro-batch, over all ranks."""
    with torch.no_grad():
        loss, count = built.loss_of(built.batch())
    return float(loss) / float(1 if count is None else count)


def main() -> None:
    """Read the request, run the steps, and write the answer."""
    request, answers = sys.argv[1:]
    steps = msgspec.json.decode(Path(request).read_bytes(), type=RealSteps)
    with join_world(steps.device) as world:
        found = real_steps(steps, world)
    leave_answer(answers, found.rank, msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
