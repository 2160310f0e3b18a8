"""Measure the rates of this machine's ranks while all work at once: products, memory, collectives.

Run as one of several ranks: ``python -m torchmuster.plan.probes.rates REQUEST ANSWERS``.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.diagnose.probes.exact_values import wait_for_device
from torchmuster.diagnose.probes.matmul import gpu_dtypes
from torchmuster.plan.hardware.catalogue import Link
from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.plan.timing.calibration import CalibrationRequest, RankRates
from torchmuster.plan.timing.rates import rate_key
from torchmuster.train.world import World, join_world
from torchmuster.units import KiB, MiB

_PRODUCT = {"cpu": 768}  # rows and columns; on accelerators:
_PRODUCT_ON_CARD = 8192
_STREAM_BYTES = {"cpu": 16 * MiB}
_STREAM_ON_CARD_BYTES = 512 * MiB
_SMALL_BYTES, _LARGE_BYTES = 64 * KiB, 16 * MiB
_NEW_BYTES = 64 * MiB  # more than the C library caches: it returns them and requests new memory
_TRIES = 7
_MEASURE_S = 0.3


def measure_rates(world: World) -> RankRates:
    """Measure this rank's rates while the others measure theirs."""
    kind = world.device.type
    types = (torch.float32, torch.bfloat16) if kind == "cpu" else gpu_dtypes(world.device)
    return RankRates(
        flops={str(one).removeprefix("torch."): _products(world, one) for one in types},
        bandwidth_bytes_s=_stream(world),
        operation_s=_beginning(world, torch.zeros(1, device=world.device)),
        sharded_operation_s=_beginning(world, _shard(world)) if world.world_size > 1 else None,
        new_memory_bytes_s=_new_memory(world) if kind == "cpu" else None,
        slow_operations=_slow_operations(world) if kind == "cpu" else {},
        collectives=_collectives(world) if world.world_size > 1 else {},
    )


def _turn_s(world: World, turn: Callable[[], object]) -> float:
    """Return the seconds of a turn while all ranks make turns.

    It is the best of several turns, since disturbances only make turns slower. With more ranks than
    cores it is the mean, since the ranks then disturb each other as in training.
    """
    turn()
    taken_s: list[float] = []
    if world.world_size > 1:
        dist.barrier()
    begun = time.perf_counter()
    while len(taken_s) < _TRIES or time.perf_counter() - begun < _MEASURE_S:
        wait_for_device(world.device)
        start = time.perf_counter()
        turn()
        wait_for_device(world.device)
        taken_s.append(time.perf_counter() - start)
    crowded = world.device.type == "cpu" and world.local_world_size > usable_cores().value
    return statistics.mean(taken_s) if crowded else min(taken_s)


def _products(world: World, dtype: torch.dtype) -> float:
    size = _PRODUCT.get(world.device.type, _PRODUCT_ON_CARD)
    left = torch.randn(size, size, device=world.device).to(dtype)
    right = torch.randn(size, size, device=world.device).to(dtype)
    return 2.0 * size**3 / _turn_s(world, lambda: left @ right)


def _stream(world: World) -> float:
    count = _STREAM_BYTES.get(world.device.type, _STREAM_ON_CARD_BYTES) // 4
    one = torch.zeros(count, device=world.device)
    two = torch.zeros_like(one)
    out = torch.zeros_like(one)
    return 12.0 * count / _turn_s(world, lambda: torch.add(one, two, out=out))


def _new_memory(world: World) -> float:
    kept = torch.zeros(_NEW_BYTES // 4)
    anew_s = _turn_s(world, lambda: torch.empty(_NEW_BYTES // 4).zero_())
    again_s = _turn_s(world, lambda: kept.zero_())
    return _NEW_BYTES / max(anew_s - again_s, 1e-6)


def _slow_operations(world: World) -> dict[str, float]:
    """Return operations far slower than memory: random numbers (dropout), drawn in one thread."""
    count = _STREAM_BYTES["cpu"] // 4
    drawn = torch.zeros(count)
    return {"aten.bernoulli_": 4.0 * count / _turn_s(world, lambda: drawn.bernoulli_(0.9))}


def _beginning(world: World, one: torch.Tensor) -> float:
    times = 200

    def turn() -> None:
        for _ in range(times):
            torch.add(one, one)

    return _turn_s(world, turn) / times


def _shard(world: World) -> torch.Tensor:
    """Return a tensor with one number per rank, sharded as by fsdp."""
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    own = torch.zeros(1, device=world.device)
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False)


def _collectives(world: World) -> dict[str, Link]:
    found = {}
    for kind, turn in _turns(world).items():
        small, large = (_agreed_s(world, turn, size) for size in (_SMALL_BYTES, _LARGE_BYTES))
        bytes_s = (_LARGE_BYTES - _SMALL_BYTES) / max(large - small, 1e-9)
        found[rate_key(kind, world.world_size)] = Link(
            latency_s=max(small - _SMALL_BYTES / bytes_s, 0.0), bytes_s=bytes_s, source="measured"
        )
    return found


def _turns(world: World) -> dict[str, Callable[[torch.Tensor, torch.Tensor], object]]:
    return {
        "all_reduce": lambda whole, part: dist.all_reduce(whole),
        "all_gather": lambda whole, part: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
    }


def _agreed_s(
    world: World, turn: Callable[[torch.Tensor, torch.Tensor], object], size_bytes: int
) -> float:
    """Return the median seconds of a collective; all ranks make the same number of turns."""
    count = size_bytes // 4 // world.world_size
    part = torch.zeros(count, device=world.device)
    whole = torch.zeros(count * world.world_size, device=world.device)
    taken_s = []
    for _ in range(_TRIES + 1):
        dist.barrier()
        wait_for_device(world.device)
        start = time.perf_counter()
        turn(whole, part)
        wait_for_device(world.device)
        taken_s.append(time.perf_counter() - start)
    return statistics.median(taken_s[1:])


def main(request: str, answers: str) -> None:
    """Measure as one of several ranks, and write the results."""
    asked = msgspec.json.decode(Path(request).read_bytes(), type=CalibrationRequest)
    with join_world(asked.device) as world:
        found = measure_rates(world)
        leave_answer(answers, world.global_rank, msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
