"""Measure matrix products on a device, and its memory in training."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all queued work. This function is complete: call it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Benchmark(NamedTuple):
    """The time of a matrix product, and the rate in 10^12 operations per second."""

    seconds: float
    tflops: float


def benchmark_matmul(device: torch.device, size: int, iterations: int = 20) -> Benchmark:
    """Time products of two random square matrices with ``time.perf_counter``.

    A device executes queued work later, so wait for it before each reading of the clock. The first
    products load libraries: run a few before the measurement. A product of n x n takes 2 n^3
    operations.
    """
    # solution
    left = torch.randn(size, size, device=device)
    right = torch.randn(size, size, device=device)
    for _ in range(3):
        torch.mm(left, right)
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(iterations):
        torch.mm(left, right)
    wait_for(device)
    seconds = (time.perf_counter() - begin) / iterations
    return Benchmark(seconds, 2 * size**3 / seconds / 1e12)
    # end of solution


def typical_seconds(samples: Sequence[float]) -> float:
    """Return the typical time of a sample, robust against outliers."""
    # solution
    return statistics.median(samples)
    # end of solution


def speedups(before_s: Mapping[int, float], after_s: Mapping[int, float]) -> dict[int, float]:
    """Return by size the speed-up of ``after_s`` over ``before_s``."""
    # solution
    return {size: before_s[size] / after_s[size] for size in before_s}
    # end of solution


def plot_speedups(speedups_by_size: Mapping[int, float], path: str) -> None:
    """Draw the speed-up by size with matplotlib, with a title for each axis, and save the picture."""
    # solution
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    axes.plot(list(speedups_by_size), list(speedups_by_size.values()), marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("size")
    axes.set_ylabel("speed-up")
    figure.savefig(path)
    pyplot.close(figure)
    # end of solution


def training_memory(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, int]:
    """Run one training step; return bytes of "weights", "activations", "gradients", "optimizer".

    Activations are what autograd saves for backward (torch.autograd.graph.saved_tensors_hooks):
    each storage once, without those of the weights.
    """
    # solution
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved_bytes: dict[int, int] = {}  # address of a storage -> size

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = criterion(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer_bytes = 0
    for state in optimizer.state.values():
        optimizer_bytes += sum(value.nbytes for value in state.values() if torch.is_tensor(value))
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return {
        "weights": sum(weight.nbytes for weight in model.parameters()),
        "activations": sum(saved_bytes.values()),
        "gradients": sum(gradient.nbytes for gradient in gradients),
        "optimizer": optimizer_bytes,
    }
    # end of solution


def saving_in_16_bits(stages: Mapping[str, int]) -> float:
    """Return the share of all bytes that autocast to 16 bits saves: only activations shrink."""
    # solution
    return stages["activations"] / 2 / sum(stages.values())
    # end of solution


def sufficient_size(tflops: Mapping[int, float]) -> int:
    """Return the smallest size that reaches at least 90 % of the best rate."""
    # solution
    best = max(tflops.values())
    return min(size for size, rate in tflops.items() if rate >= 0.9 * best)
    # end of solution


def main() -> None:
    """Measure this machine; with a GPU, draw its speed-up over the CPU."""
    cpu = {size: benchmark_matmul(torch.device("cpu"), size) for size in (128, 256, 512, 1024)}
    for size, result in cpu.items():
        print(f"cpu {size}: {result.tflops:.3f} TFLOPS")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        seconds = {size: benchmark_matmul(device, size).seconds for size in cpu}
        before = {size: result.seconds for size, result in cpu.items()}
        plot_speedups(speedups(before, seconds), "speedup.png")


if __name__ == "__main__":
    main()
