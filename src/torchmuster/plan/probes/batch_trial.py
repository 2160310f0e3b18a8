"""A rank of a trial: a few steps with micro-batches of one size, and whether memory was enough for them.

Started by ``plan/proof/trials.py`` as ``python -m torchmuster.plan.probes.batch_trial REQUEST ANSWERS``.
"""

import sys
from pathlib import Path

import msgspec
import torch

from torchmuster.launch.garbage_collection import freeze_objects
from torchmuster.plan.probes.building import build
from torchmuster.plan.probes.limit import limited
from torchmuster.plan.proof.batch_finder import RankTrial
from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.plan.proof.trials import TrialRequest
from torchmuster.train.out_of_memory import is_out_of_memory
from torchmuster.train.world import World, join_world

# The optimiser's states are there after the first, and ddp has cut its buckets anew after the second.
STEPS = 3


def main(request: str, answers: str) -> None:
    """Be a rank of a trial: leave an answer in a folder, and fail where memory runs out."""
    asked = msgspec.json.decode(Path(request).read_bytes(), type=TrialRequest)
    with join_world(asked.device) as world:
        answer = attempt(asked, world)
        leave_answer(answers, world.global_rank, msgspec.json.encode(answer).decode())
        if answer.ran_out:
            # The others wait in a collective for this rank: its end makes the launcher end them.
            sys.exit(f"rank {answer.rank} ran out of memory: {answer.words}")


def attempt(asked: TrialRequest, world: World) -> RankTrial:
    """Train a few steps, and say how it went."""
    rank = world.global_rank
    limit = asked.limits_bytes[rank] if asked.limits_bytes is not None else None
    on_cpu = world.device.type == "cpu"
    with limited(limit) as followed:
        try:
            built = build(asked.work, asked.candidate, world)
            for number in range(STEPS):
                built.train(number)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return RankTrial(rank=rank, ran_out=True, limit_bytes=limit, words=str(error))
    return RankTrial(
        rank=rank,
        ran_out=False,
        peak_bytes=followed.peak_bytes if on_cpu else _device_peak(world.device),
        limit_bytes=limit if on_cpu else _device_memory(world.device),
    )


def _device_peak(device: torch.device) -> int:
    return torch.accelerator.max_memory_reserved(device)


def _device_memory(device: torch.device) -> int:
    return torch.accelerator.get_memory_info(device)[1]


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:
        freeze_objects()
