"""Timing what several ranks do together: as often, and in the same drawn order, on all of them.

``clock.py`` does it for one process. Here every choice is agreed on, since a collective that one rank calls once
more than the others never ends.
"""

import random
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch.distributed as dist

from torchmuster.bench.probes.clock import calls_per_sample
from torchmuster.bench.turn_taking import Turns
from torchmuster.diagnose.probes.exact_values import wait_for_device
from torchmuster.train.world import World, all_gather_object

_MOST_CALLS = 1000  # of one sample


def interleaved_on_ranks(
    turns: Mapping[str, Callable[[], object]],
    *,
    world: World,
    rounds: int,
    least_sample_s: float = 0.01,
    least_calls: int = 1,
    after_round: Callable[[int], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, tuple[float, ...]]:
    """Return this rank's seconds per call of each turn, a sample in every round.

    Each turn is warmed up, and called so often in a sample that it lasts ``least_sample_s`` on the slowest rank, and at least
    ``least_calls`` times. In each round every turn is sampled once, in an order that is drawn anew. All ranks begin a sample together.
    """

    def sample(turn: Callable[[], object], calls: int) -> float:
        if calls > 1:  # wakes threads and fills caches that the others have taken
            turn()
        wait_for_device(world.device)
        if world.world_size > 1:
            dist.barrier()
        begun_s = clock()
        for _ in range(calls):
            turn()
        wait_for_device(world.device)
        return clock() - begun_s

    def slowest(turn: Callable[[], object], calls: int) -> float:
        return max(map(float, all_gather_object(sample(turn, calls), world)))

    # All ranks hear the same times, and come to the same numbers.
    calls = {
        name: max(
            least_calls,
            calls_per_sample(
                partial(slowest, turn),
                least_sample_s=least_sample_s,
                warm_up_s=least_sample_s,
                most_calls=_MOST_CALLS,
            ),
        )
        for name, turn in turns.items()
    }
    taken_s: dict[str, list[float]] = {name: [] for name in turns}
    draw = random.Random(0)  # the same on every rank
    mine = Turns(asks=world.is_first)  # the others wait for it before each sample
    for number in range(rounds):
        order = list(turns)
        draw.shuffle(order)
        for name in order:
            with mine:
                taken_s[name].append(sample(turns[name], calls[name]) / calls[name])
        after_round(number)
    mine.close()
    return {name: tuple(samples) for name, samples in taken_s.items()}
