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
from torchmuster.plan.real_steps import FOLLOWED, RankSteps, RealSteps
from torchmuster.train.out_of_memory import is_out_of_memory
from torchmuster.train.world import World, join_world


@contextmanager
def peaks_of_tensors(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak of tensors since its last call.

    An accelerator's allocator has counters. On the CPU every storage is followed, which is slow.
    """
    if device.type != "cpu":
        yield lambda: _peak_of_accelerator(device)
        return
    tracer = StepTracer(on_host=True)

    def read() -> int:
        tracer.note_peak()
        peak_bytes = max(peak.peak_bytes for peak in tracer.peaks.values())
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
    try:
        with peaks_of_tensors(device) as read_peak:
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
        return RankSteps(rank=rank, ran_out=str(error))
    reserved_bytes = 0
    if device.type != "cpu":
        reserved_bytes = int(torch.accelerator.max_memory_reserved(device))
    return RankSteps(
        rank=rank,
        peaks_bytes=tuple(peaks),
        reserved_bytes=reserved_bytes,
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
        if measured.ran_out is not None:
            # The others wait in a collective: the launcher stops them when this rank exits.
            sys.exit(f"rank {measured.rank} ran out of memory: {measured.ran_out}")


if __name__ == "__main__":
    try:
        main()
    finally:
        freeze_objects()
