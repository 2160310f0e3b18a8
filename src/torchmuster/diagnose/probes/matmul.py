"""The device stage: correctness and speed of matrix products on each rank."""

import time
from collections.abc import Sequence

import torch

from torchmuster.diagnose.probes.exact_values import compare_values, wait_for_device
from torchmuster.diagnose.rank_record import Matmul, Values

_BLOCK = 256
_TIMES_ON_GPU = 16  # repeats of the block in both directions: 4096 x 4096
_WARM_S = 0.1
_MEASURE_S = 0.5
# Reduced-precision reductions round partial sums, so their results are not exact.
_LESS_PRECISE = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)


def gpu_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes in which the current GPU has matrix products of its own."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return (torch.float32, torch.float16)
    return (torch.float32, torch.bfloat16, torch.float16)


def check_matmuls(device: torch.device) -> tuple[Matmul, ...]:
    """Multiply matrices for 0.6 s in each dtype and compare every value with the expected one.

    The factors contain only -1, 0 and 1 and the sums stay small, so the product is exact in every
    dtype. The expected values are computed with integers on the CPU.
    """
    settings = torch.backends.cuda.matmul
    allowed = {name: getattr(settings, name) for name in _LESS_PRECISE}
    threads = torch.get_num_threads()
    # The speed of one core is comparable; that of a thread pool depends on other load.
    torch.set_num_threads(1)
    try:
        for name in allowed:
            setattr(settings, name, False)
        kinds = (torch.float32,) if device.type == "cpu" else gpu_dtypes()
        return tuple(_measure(device, kind) for kind in kinds)
    finally:
        torch.set_num_threads(threads)
        for name, value in allowed.items():
            setattr(settings, name, value)


def better_matmuls(new: Sequence[Matmul], old: Sequence[Matmul]) -> tuple[Matmul, ...]:
    """Return the better speeds of two runs, and the values of both."""
    better = []
    for first, second in zip(old, new, strict=True):
        speed = max(first.flops_per_s, second.flops_per_s)
        values = first.values + second.values
        better.append(Matmul(precision=first.precision, flops_per_s=speed, values=values))
    return tuple(better)


def _measure(device: torch.device, precision: torch.dtype) -> Matmul:
    left, right, expected = _factors(device, precision)
    values, best_s = Values(), float("inf")
    began = time.perf_counter()
    while (passed_s := time.perf_counter() - began) < _WARM_S + _MEASURE_S:
        wait_for_device(device)
        turn = time.perf_counter()
        product = torch.matmul(left, right)
        wait_for_device(device)
        seconds = time.perf_counter() - turn
        values += compare_values(product, expected)
        if passed_s >= _WARM_S or best_s == float("inf"):
            # The best of many short turns: other processes take the core only now and then.
            best_s = min(best_s, seconds)
    flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    name = str(precision).removeprefix("torch.")
    return Matmul(precision=name, flops_per_s=flops / best_s, values=values)


def _factors(
    device: torch.device, precision: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices and their product, made of repeated blocks with a known product."""
    times = 1 if device.type == "cpu" else _TIMES_ON_GPU
    maker = torch.Generator().manual_seed(1)
    left, right = (torch.randint(-1, 2, (_BLOCK, _BLOCK), generator=maker) for _ in range(2))
    # A power of two times an integer below 256 is exact with an 8-bit mantissa.
    product = torch.matmul(left, right) * times
    return (
        left.repeat(times, times).to(device, precision),
        right.repeat(times, times).to(device, precision),
        product.repeat(times, times).to(device, precision),
    )
