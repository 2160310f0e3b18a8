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


def memory_of(call: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Return the peak memory of a call above the memory before it, and the change that remains.

    On a GPU these are the allocator's figures, on a CPU the sums of the allocations that the profiler
    reports, including the temporary memory of kernels. A result of the call does not remain.
    """
    if device.type != "cpu":
        before = int(torch.accelerator.memory_allocated(device))
        torch.accelerator.reset_peak_memory_stats(device)
        call()
        after = int(torch.accelerator.memory_allocated(device))
        return int(torch.accelerator.max_memory_allocated(device)) - before, after - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        call()
    # The profiler's public tables have only sums.
    events: Any = seen.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    levels = list(accumulate(size for _, size in sorted(changes)))
    return max(0, *levels), sum(size for _, size in changes)


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference relative to the norm of the exact result.

    NaN if the result has a NaN, which no limit accepts.
    """
    exact = exact.detach().double().cpu()
    return float((result.detach().double().cpu() - exact).norm() / exact.norm())
