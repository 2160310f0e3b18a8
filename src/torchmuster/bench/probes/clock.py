"""How long calls take: several things in turns, so that what happens to the machine happens to all of them.

``torch.utils.benchmark.Timer`` measures one thing after the other. A machine that slows down in between (heat,
a neighbour) then looks like a difference between the things. Here every round has a sample of each, in a drawn order.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Mapping

import torch

from torchmuster.bench.turn_taking import Turns

_MOST_CALLS = 1 << 20


def interleaved(
    turns: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    rounds: int = 15,
    least_sample_s: float = 0.01,
    warm_up_s: float = 0.2,
    say: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, tuple[float, ...]]:
    """Return seconds per call of each turn, one for each round.

    Each turn is first called for ``warm_up_s``, and as often in a sample as makes it last ``least_sample_s``. The device
    is waited for before and after each sample. Python's garbage collector waits as well.
    """

    def timed(turn: Callable[[], object], calls: int) -> float:
        _wait_for(device)
        begun_s = clock()
        for _ in range(calls):
            turn()
        _wait_for(device)
        return clock() - begun_s

    calls = {}
    for name, turn in turns.items():
        if say is not None:
            say(f"warming up: {name}")
        calls[name] = calls_per_sample(
            lambda count, turn=turn: timed(turn, count),  # type: ignore[misc]
            least_sample_s=least_sample_s,
            warm_up_s=warm_up_s,
        )
    samples: dict[str, list[float]] = {name: [] for name in turns}
    drawn = random.Random(
        0
    )  # the same order in every process: it is no difference between two runs
    order = list(turns)
    mine = Turns()
    if device.type == "cpu" and torch.get_num_threads() == 1:
        mine.stay_on_one_core()
    collecting = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()  # what is there already need not be looked at after each round
    try:
        for number in range(rounds):
            if say is not None:
                say(f"round {number + 1} of {rounds}")
            drawn.shuffle(order)
            for name in order:
                with mine:
                    if calls[name] > 1:  # wakes threads and fills caches that the others have taken
                        turns[name]()
                    samples[name].append(timed(turns[name], calls[name]) / calls[name])
            gc.collect()
    finally:
        mine.close()
        gc.unfreeze()
        if collecting:
            gc.enable()
    return {name: tuple(some) for name, some in samples.items()}


def calls_per_sample(
    timed: Callable[[int], float],
    *,
    least_sample_s: float,
    warm_up_s: float,
    most_calls: int = _MOST_CALLS,
) -> int:
    """Warm up by calling more and more often; return how many calls make a sample long enough."""
    timed(1)  # compiles, allocates, fills caches: says nothing about the next one
    calls, total_s = 1, 0.0
    while True:
        took_s = timed(calls)
        total_s += took_s
        if took_s < least_sample_s and calls < most_calls:
            share = least_sample_s / max(took_s, 1e-9)
            calls = min(most_calls, calls * max(2, min(10, math.ceil(share))))
        elif total_s >= warm_up_s:
            # The last one was warm: no more calls than are needed.
            return max(1, math.ceil(calls * min(1.0, least_sample_s / max(took_s, 1e-9))))


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
