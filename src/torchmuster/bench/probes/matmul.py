"""Measures matrix products in every dtype of the device, interleaved, and checks the results."""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from torchmuster.bench.matmul import MatmulAnswer, MatmulRequest, MatmulShape, Product
from torchmuster.bench.probes.clock import (
    CPU,
    device_name,
    device_of,
    interleaved,
    number_types,
    quickest_s,
)
from torchmuster.bench.statistics import estimate
from torchmuster.errors import Impossible
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.probes.build_step import build_step
from torchmuster.plan.probes.fake_process_group import fake_process_group, masks_of_real_runs
from torchmuster.plan.probes.live_storage import LiveStorages, named_refusals
from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.train.weights import own_name

# nn.Linear stores its weight as (out, in); Conv1D of transformers' GPT-2 as (in, out).
_KINDS = ("Linear", "Conv1D")


def linear_shapes(work: Work, micro_batch_size: int) -> tuple[MatmulShape, ...]:
    """Return the products of one forward of a micro-batch.

    Equal layers are merged with their count.
    """
    counted: Counter[tuple[int, int, int, str]] = Counter()

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            inner, columns = args[0].shape[-1], output.shape[-1]
            rows = math.prod(args[0].shape[:-1])
            counted[rows, inner, columns, re.sub(r"\b\d+\b", "*", own_name(name))] += 1

        return hook

    one_rank = Candidate(
        strategy="single",
        layout=ShardLayout(copies=1, shards=1),
        micro_batch_size=micro_batch_size,
    )
    seen = LiveStorages(answer=lambda _: None, on_host=True)
    nobody_else = fake_process_group(1, ranks_per_machine=1, reduced=lambda bucket, ranks: None)
    with named_refusals(seen), nobody_else as world:
        built = build_step(work, one_rank, world)
        for name, module in built.model.named_modules():
            if type(module).__name__ in _KINDS:
                module.register_forward_hook(note(name))
        with masks_of_real_runs(packed=work.packed):
            built.loss_of(built.batch())
    if not counted:
        raise Impossible(
            "this model has no linear layers to measure",
            why="its forward calls no torch.nn.Linear",
            fix="omit the model and pass sizes: --sizes 1024 2048",
        )
    return tuple(
        MatmulShape(rows=rows, inner=inner, columns=columns, layer=layer, times=times)
        for (rows, inner, columns, layer), times in counted.items()
    )


_DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Allowed rounding error relative to the norm: a few times the dtype's epsilon. Sums in 16 bits
# exceed it.
_MOST_ERROR = {"float32": 1e-5, "tf32": 2e-3, "bfloat16": 1e-2, "float16": 2e-3}
_ROWS_CHECKED = 8


def time_products(request: MatmulRequest) -> MatmulAnswer:
    """Measure all requested products: on the accelerator and the CPU, or only on the CPU."""
    shapes = request.shapes
    if request.work is not None:
        shapes = linear_shapes(request.work, request.micro_batch_size)
    device = device_of(request.device)
    types, missing = number_types(device)
    found = _on(device, shapes, types, request)
    if device.type != "cpu":
        found += _on(CPU, shapes, number_types(CPU)[0], request)
    return MatmulAnswer(
        device=str(device),
        device_name=device_name(device),
        threads=torch.get_num_threads(),
        products=tuple(found),
        missing_types=missing,
    )


def _on(
    device: torch.device,
    shapes: Sequence[MatmulShape],
    types: Sequence[str],
    request: MatmulRequest,
) -> list[Product]:
    """Measure products that do not take too long, interleaved; ordered by shape, then dtype."""
    turns: dict[str, Callable[[], object]] = {}
    found: dict[tuple[int, int], Product] = {}
    for kind, number_type in enumerate(types):
        best_flops_s = 0.0
        for number, shape in sorted(enumerate(shapes), key=lambda one: one[1].flops):
            product = Product(shape=shape, number_type=number_type, on_cpu=device.type == "cpu")
            expected_s = shape.flops / best_flops_s if best_flops_s else 0.0
            if request.longest_s is not None and expected_s > request.longest_s:
                reason = f"one product would take about {expected_s:.2g} s"
                found[number, kind] = replace(product, left_out=reason)
                continue
            left, right = _factors(shape, number_type, device)
            turn = partial(_multiply, left, right, number_type)
            error = _error(turn(), left, right)
            best_flops_s = max(best_flops_s, shape.flops / quickest_s(turn, device))
            is_right = error <= _MOST_ERROR[number_type]
            found[number, kind] = replace(product, error=error, right=is_right)
            turns[f"{number} {kind}"] = turn
    taken = interleaved(turns, device=device, rounds=request.rounds)
    return [
        replace(found[key], call_s=taken.get(f"{key[0]} {key[1]}", ())) for key in sorted(found)
    ]


def _factors(
    shape: MatmulShape, number_type: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    maker = torch.Generator().manual_seed(shape.flops)
    sizes = (shape.rows, shape.inner), (shape.inner, shape.columns)
    left, right = (
        torch.randn(size, generator=maker).to(device, _DTYPES[number_type]) for size in sizes
    )
    return left, right


def _multiply(left: torch.Tensor, right: torch.Tensor, number_type: str) -> torch.Tensor:
    if number_type != "tf32":
        return left @ right
    torch.set_float32_matmul_precision("high")
    try:
        return left @ right
    finally:
        torch.set_float32_matmul_precision("highest")


def _error(product: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the error of the first and last rows against float64 on the CPU."""
    rows = [*range(min(_ROWS_CHECKED, len(left))), len(left) - 1]
    expected = left[rows].cpu().double() @ right.cpu().double()
    return float((product[rows].cpu().double() - expected).norm() / expected.norm())


def benchmark_matmul(
    device: str | torch.device, size: int, iterations: int = 100
) -> dict[str, Any]:
    """Multiply two square float32 matrices on a device; the legacy function of ``distributed``."""
    if size < 1 or iterations < 1:
        raise Impossible(
            f"benchmark_matmul: invalid size {size} or iterations {iterations}",
            why="both must be at least 1",
            fix='benchmark_matmul("cpu", 1024, 100)',
        )
    place = torch.device(device)
    shape = MatmulShape(rows=size, inner=size, columns=size)
    left, right = _factors(shape, "float32", place)
    turns = {"product": partial(_multiply, left, right, "float32")}
    found = estimate(interleaved(turns, device=place, rounds=iterations)["product"])
    return {
        "device": str(place),
        "size": size,
        "iterations": iterations,
        "seconds": found.median,
        "tflops": shape.flops / found.median / 1e12,
        "noise": found.noise,
    }


def main(request: str, answers: str) -> None:
    """Read the request, measure, and write the answer."""
    asked = msgspec.json.decode(Path(request).read_bytes(), type=MatmulRequest)
    leave_answer(answers, 0, msgspec.json.encode(time_products(asked)).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
