"""Timing with ``torch.utils.benchmark``, and the device to measure on. Imports torch.

``Timer`` synchronizes the device, warms up, and repeats short calls inside a sample.
"""

import random
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

ROUNDS = 4
CPU = torch.device("cpu")


def time_calls(
    calls: Mapping[str, Callable[[], object]], seconds: float = 0.4
) -> dict[str, tuple[float, ...]]:
    """Return the seconds per call of each call, several samples each.

    Each call is measured for about ``seconds``, in several rounds and in a random order, so that a
    host that slows down in between does not look like a difference between the calls.
    """
    timers = {name: timer(call) for name, call in calls.items()}
    samples: dict[str, tuple[float, ...]] = dict.fromkeys(calls, ())
    order = list(calls)
    shuffle = random.Random(0).shuffle
    for name in order:
        timers[name].timeit(1)  # compiles and allocates: not representative
    for _ in range(ROUNDS):
        shuffle(order)
        for name in order:
            measured = timers[name].blocked_autorange(min_run_time=seconds / ROUNDS)
            samples[name] += tuple(measured.times)
    return samples


def timer(call: Callable[[], object]) -> Timer:
    """Return a timer that computes with all threads of this process; torch's default is one."""
    return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())


def device_for(name: str) -> torch.device:
    """Return the first GPU that this process sees for ``gpu``, the CPU for ``cpu``."""
    if name == "cpu":
        return CPU
    gpu = torch.accelerator.current_accelerator(check_available=True)
    assert gpu is not None, "the command has checked that there is a GPU"
    return torch.device(gpu.type, 0)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of a call above the memory before it.

    On a GPU this is the allocator's figure, on a CPU the sum of the allocations that the profiler
    reports, including the temporary memory of kernels.
    """
    if device.type != "cpu":
        before = int(torch.accelerator.memory_allocated(device))
        torch.accelerator.reset_peak_memory_stats(device)
        call()
        return int(torch.accelerator.max_memory_allocated(device)) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        result = call()
    del result
    return max(0, *accumulate(size for _, size in allocations(seen)))


def allocations(seen: profile) -> list[tuple[int, int]]:
    """Return (time in ns, bytes) of each allocation (positive) and release (negative), in order.

    The profiler's public tables have only sums.
    """
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = [event for event in events if event.name() == "[memory]"]
    return [(event.start_ns(), event.nbytes()) for event in memory]


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference relative to the norm of the exact result.

    NaN if the result has a NaN, which no limit accepts.
    """
    exact = exact.detach().double().cpu()
    return float((result.detach().double().cpu() - exact).norm() / exact.norm())


def recorded_ranges(seen: profile, prefix: str) -> list[tuple[str, int, int]]:
    """Return (name, begin in ns, end in ns) of the ``record_function`` ranges with this prefix."""
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    ranges = []
    for event in events:
        if event.name().startswith(prefix):
            name = event.name().removeprefix(prefix)
            ranges.append((name, event.start_ns(), event.start_ns() + event.duration_ns()))
    return sorted(ranges, key=lambda found: found[1])
