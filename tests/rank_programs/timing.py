"""Ranks that time messages and steps, some of them with something wrong or slow."""

import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from torchmuster.bench.bandwidth import OPERATIONS
from torchmuster.bench.collectives import CollectivesRequest as AskedMessages
from torchmuster.bench.collectives import CollectiveTimes
from torchmuster.bench.probes import collectives, scaling
from torchmuster.bench.scaling import ScalingRequest, ScalingStudy
from torchmuster.bench.scaling import ScalingTimes as RankSteps
from torchmuster.plan.job import Work
from torchmuster.train.world import World

SLEEP_S = 0.2


def messages(world: World, wrong: bool) -> CollectiveTimes:
    """Time all kinds of messages; with ``wrong``, rank 1 gets one wrong value out of each all-reduce."""
    if wrong and world.global_rank == 1:
        reduce = dist.all_reduce

        def spoilt(tensor: torch.Tensor, *words: Any, **named: Any) -> Any:
            done = reduce(tensor, *words, **named)
            tensor.view(-1)[-1] += 1
            return done

        dist.all_reduce = spoilt
    asked = AskedMessages(
        operations=("all-reduce",) if wrong else tuple(OPERATIONS),
        sizes_bytes=(100, 5000),
        rounds=3,
        device="cpu",
        least_sample_s=0.001,
    )
    return collectives.collective_times(asked, world)


def model() -> nn.Module:
    """Return a model that takes its time on rank 1, as its ranks know by the group."""
    return _Slow()


class _Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(SLEEP_S)
        done: torch.Tensor = self.layer(x)
        return done


class _SlowData:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(SLEEP_S / 4)
        return torch.ones(4), index % 2


def quick_data() -> list[tuple[torch.Tensor, int]]:
    """Return samples that lie in memory."""
    return [(torch.ones(4), number % 2) for number in range(64)]


def slow_data() -> _SlowData:
    """Return samples that take their time."""
    return _SlowData()


def steps(world: World, strategy: Literal["ddp", "fsdp"], data: str) -> RankSteps:
    """Time steps of a model that is slow on rank 1."""
    work = Work(
        build=f"{__name__}:model",
        dataset=f"{__name__}:{data}",
        folder=str(Path(__file__).parents[1]),
    )
    study = ScalingStudy(
        work=work,
        strategy=strategy,
        precision="fp32",
        ranks=(1, 2),
        whole=2,
        micro_batch_size=None,
        workers=0,
        device="cpu",
        threads=1,
        slots=2,
        rounds=2,
        passes=1,
    )
    return scaling.step_times(ScalingRequest(study=study, portions=(2,)), world)
