"""Timing what several ranks do together: as often, and in the same drawn order, on all of them.

``clock.py`` does it for one process. Here every choice is agreed on, since a collective that one rank calls once
more than the others never ends.
"""

import math
import random
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from torchmuster.train.agreement import tell_all
from torchmuster.train.world import World
from torchmuster.verify.probes.exact_values import wait_for_device

_MOST_CALLS = 1000  # of one sample
_WARM_UP_CALLS = 2


def interleaved_on_ranks(
    turns: Mapping[str, Callable[[], object]],
    *,
    world: World,
    rounds: int,
    least_sample_s: float = 0.01,
    after_round: Callable[[int], None] = lambda _: None,
) -> dict[str, tuple[float, ...]]:
    """Return this rank's seconds per call of each turn, a sample in every round.

    Each turn is warmed up, and called so often in a sample that it lasts ``least_sample_s`` on the slowest rank. In each
    round every turn is sampled once, in an order that is drawn anew. All ranks begin a sample together.
    """
    calls = {name: _calls(turn, world, least_sample_s) for name, turn in turns.items()}
    taken_s: dict[str, list[float]] = {name: [] for name in turns}
    draw = random.Random(0)  # the same on every rank
    for number in range(rounds):
        order = list(turns)
        draw.shuffle(order)
        for name in order:
            sample_s = _sample(turns[name], calls[name], world)
            taken_s[name].append(sample_s / calls[name])
        after_round(number)
    return {name: tuple(samples) for name, samples in taken_s.items()}


def _calls(turn: Callable[[], object], world: World, least_sample_s: float) -> int:
    for _ in range(_WARM_UP_CALLS):
        turn()
    slowest_s: float = max(tell_all(_sample(turn, 1, world), world))
    return min(_MOST_CALLS, max(1, math.ceil(least_sample_s / max(slowest_s, 1e-9))))


def _sample(turn: Callable[[], object], calls: int, world: World) -> float:
    wait_for_device(world.device)
    if world.world_size > 1:
        dist.barrier()
    begun_s = time.perf_counter()
    for _ in range(calls):
        turn()
    wait_for_device(world.device)
    return time.perf_counter() - begun_s
