"""Interleaved timing of several calls, so that disturbances of the host affect all of them.

``torch.utils.benchmark.Timer`` measures one call after the other. A host that slows down in between
(heat, other load) then looks like a difference between the calls. Here every round has a sample of
each, in random order.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from torchmuster.diagnose.probes.exact_values import wait_for_device
from torchmuster.train.world import World, all_gather_object

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
    """Return seconds per call of each turn, one sample per round.

    Each turn is warmed up for ``warm_up_s``, and called in a sample until it lasts
    ``least_sample_s``. The device is synchronized before and after each sample. Python's garbage
    collector is paused.
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
    drawn = random.Random(0)  # the same order in every process
    order = list(turns)
    collecting = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()  # existing objects need not be scanned after each round
    try:
        for number in range(rounds):
            if say is not None:
                say(f"round {number + 1} of {rounds}")
            drawn.shuffle(order)
            for name in order:
                if calls[name] > 1:  # wakes threads and fills caches that the others have taken
                    turns[name]()
                samples[name].append(timed(turns[name], calls[name]) / calls[name])
            gc.collect()
    finally:
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
    """Warm up with an increasing number of calls; return the calls per sample."""
    timed(1)  # compiles, allocates, fills caches: not representative
    calls, total_s = 1, 0.0
    while True:
        took_s = timed(calls)
        total_s += took_s
        if took_s < least_sample_s and calls < most_calls:
            share = least_sample_s / max(took_s, 1e-9)
            calls = min(most_calls, calls * max(2, min(10, math.ceil(share))))
        elif total_s >= warm_up_s:
            # The last one was warm: use no more calls than needed.
            return max(1, math.ceil(calls * min(1.0, least_sample_s / max(took_s, 1e-9))))


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


_MOST_CALLS_ON_RANKS = 1000  # of one sample


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

    Each turn is warmed up, and called in a sample until it lasts ``least_sample_s`` on the slowest
    rank, and at least ``least_calls`` times. In each round every turn is sampled once, in a new
    random order. All ranks start a sample together.
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

    # All ranks get the same times and compute the same numbers.
    calls = {
        name: max(
            least_calls,
            calls_per_sample(
                partial(slowest, turn),
                least_sample_s=least_sample_s,
                warm_up_s=least_sample_s,
                most_calls=_MOST_CALLS_ON_RANKS,
            ),
        )
        for name, turn in turns.items()
    }
    taken_s: dict[str, list[float]] = {name: [] for name in turns}
    draw = random.Random(0)  # the same on every rank
    for number in range(rounds):
        order = list(turns)
        draw.shuffle(order)
        for name in order:
            taken_s[name].append(sample(turns[name], calls[name]) / calls[name])
        after_round(number)
    return {name: tuple(samples) for name, samples in taken_s.items()}


CPU = torch.device("cpu")
_TF32_FROM = (8, 0)  # NVIDIA's compute capability
_TRIES = 3


def device_of(asked: Literal["auto", "cpu"]) -> torch.device:
    """Return the accelerator that this process sees first, or the CPU."""
    usable = torch.accelerator.current_accelerator(check_available=True)
    return CPU if asked == "cpu" or usable is None else torch.device(usable.type, 0)


def device_name(device: torch.device) -> str:
    """Return the device name from the driver, or from torch."""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if named is None else str(named(device))


def number_types(device: torch.device) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the dtypes of products on a device, and why the others are left out."""
    if device.type == "cpu":
        return ("float32", "bfloat16"), {
            "tf32": "a mode of accelerators' float32 units",
            "float16": "not measured on CPUs, because training does not use it there",
        }
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability >= _TF32_FROM:
            return ("float32", "tf32", "bfloat16", "float16"), {}
        older = "NVIDIA GPUs support it from compute capability 8.0 on"
        return ("float32", "float16"), {"tf32": older, "bfloat16": older}
    return ("float32", "bfloat16", "float16"), {"tf32": "a mode of NVIDIA GPUs"}


def quickest_s(turn: Callable[[], object], device: torch.device) -> float:
    """Return the approximate minimum duration of a call, robust against other load."""
    taken_s = []
    for _ in range(_TRIES):
        wait_for_device(device)
        begun_s = time.perf_counter()
        turn()
        wait_for_device(device)
        taken_s.append(time.perf_counter() - begun_s)
    return min(taken_s)
