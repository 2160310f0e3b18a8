"""A rank that runs real steps of a plan and reports their memory and time.

Memory is tracked in the first steps and time is measured in the later ones: on the CPU, tracking
slows a step down.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from torchmuster.launch.garbage_collection import freeze_objects
from torchmuster.launch.local_ranks import leave_answer
from torchmuster.plan.probes.build_step import BuiltStep, build_step
from torchmuster.plan.probes.step_tracer import StepTracer
from torchmuster.plan.proof.real_ranks import FOLLOWED, RankSteps, RealSteps
from torchmuster.train.out_of_memory import is_out_of_memory
from torchmuster.train.world import World, join_world
from torchmuster.units import format_bytes

# A collective returns before gloo's threads have freed their send buffers. They need less than a
# millisecond if a core is free.
_FREED_WITHIN_S = 2.0


class LimitedTracer(StepTracer):  # type: ignore[no-untyped-call]
    """Raise an out-of-memory error where tensors exceed a limit: a CPU's kernel kills instead."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(on_host=True)
        self._limit_bytes = limit_bytes

    def see(self, storage: torch.UntypedStorage, category: str | None = None) -> None:
        """Count a storage with its current size; raise if the limit is exceeded."""
        super().see(storage, category)
        until_s = time.monotonic() + _FREED_WITHIN_S
        while self.live_bytes > self._limit_bytes:
            if time.monotonic() > until_s:
                raise torch.OutOfMemoryError(
                    f"out of memory. Tried to allocate {storage.nbytes()} bytes. This rank may use "
                    f"{format_bytes(self._limit_bytes)}"
                )
            time.sleep(0.001)


@contextmanager
def peaks_of_tensors(device: torch.device, limit_bytes: int | None) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak of tensors since its last call.

    An accelerator's allocator has counters. On the CPU every storage is followed, which is slow.
    """
    if device.type != "cpu":
        yield lambda: _peak_of_accelerator(device)
        return
    tracer = StepTracer(on_host=True)
    if limit_bytes is not None:
        tracer = LimitedTracer(limit_bytes)

    def read() -> int:
        tracer.note_peak()
        peak_bytes = max(level.total_bytes for level in tracer.peaks.values())
        tracer.begin_step()
        return peak_bytes

    with tracer.followed():
        yield read


def _peak_of_accelerator(device: torch.device) -> int:
    peak_bytes = int(torch.accelerator.max_memory_allocated(device))
    torch.accelerator.reset_peak_memory_stats(device)
    return peak_bytes


def real_steps(request: RealSteps, world: World) -> RankSteps:
    """Run the steps, on all ranks."""
    rank, device = world.global_rank, world.device
    limit_bytes = None
    if request.limits_bytes is not None:
        limit_bytes = request.limits_bytes[rank]
    elif device.type != "cpu":
        limit_bytes = int(torch.accelerator.get_memory_info(device)[1])
    try:
        with peaks_of_tensors(device, limit_bytes) as read_peak:
            built = build_step(request.work, request.candidate, world)
            peaks = []
            for number in range(FOLLOWED):
                read_peak()
                built.train(number)
                peaks.append(read_peak())
        step_s = tuple(_timed(built, FOLLOWED + number) for number in range(request.timed))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return RankSteps(rank=rank, device=str(device), ran_out=str(error), limit_bytes=limit_bytes)
    reserved = None
    if device.type != "cpu":
        reserved = int(torch.accelerator.max_memory_reserved(device))
    return RankSteps(
        rank=rank,
        device=str(device),
        peaks_bytes=tuple(peaks),
        reserved_bytes=reserved,
        limit_bytes=limit_bytes,
        step_s=step_s,
    )


def _timed(built: BuiltStep, number: int) -> float:
    device = built.world.device
    if built.world.world_size > 1:
        dist.barrier()  # so that no rank's time includes waiting for others to start
    begun_s = time.perf_counter()
    built.train(number)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begun_s


def main() -> None:
    """Read the request, run the steps, and write the answer."""
    request_path, answers = sys.argv[1:]
    request = msgspec.json.decode(Path(request_path).read_bytes(), type=RealSteps)
    with join_world(request.device) as world:
        measured = real_steps(request, world)
        leave_answer(answers, measured.rank, msgspec.json.encode(measured).decode())
        if measured.ran_out:
            # The others wait in a collective: the launcher stops them when this rank exits.
            sys.exit(f"rank {measured.rank} ran out of memory: {measured.ran_out}")


if __name__ == "__main__":
    try:
        main()
    finally:
        freeze_objects()
