"""Times data loading as in training, for several loader configurations."""

import ctypes
import hashlib
import math
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from torchmuster.bench.loader import LoaderRequest, Reading, Visit
from torchmuster.bench.probes.clock import interleaved
from torchmuster.errors import Impossible
from torchmuster.train.data.loader import PREFETCH
from torchmuster.train.data.pytree import map_tensors, move_to_device, tensors_in
from torchmuster.train.data.step import Loader, MicroBatch
from torchmuster.train.seeds import seed_process
from torchmuster.train.world import World, all_gather_object

# Micro-batches at the start of an epoch whose content is compared between configurations.
_COMPARED = 4
_LEAST_TURN_S = 0.05
_LEAST_TURNS, _MOST_TURNS = 3, 40
_MOST_SETTLING_S = 1.0
# A thread counts as computing from this share of the busiest thread on.
_BUSY_SHARE = 0.25
_LEAST_CPU_S = 0.03  # the system counts in hundredths

MakeLoader = Callable[[Reading], Loader]


def visit_all(request: LoaderRequest, make: MakeLoader, world: World) -> tuple[Visit, ...]:
    """Measure each configuration once per round, in a random order shared by all ranks."""
    drawn = random.Random(0)
    order = list(request.readings)
    found = []
    for number in range(request.rounds):
        drawn.shuffle(order)
        for place, reading in enumerate(order):
            share = (number * len(order) + place) / (request.rounds * len(order))
            found.append(_visit(make(reading), reading, world, request.window_s, share))
    return tuple(found)


def _visit(loader: Loader, reading: Reading, world: World, window_s: float, share: float) -> Visit:
    """Measure one configuration; ``share`` is the start position, so that no data is read twice."""
    # Without workers, the dataset uses this generator.
    seed_process(0)
    try:
        first_batch_s, digests, took_s = _beginning(loader, world)
        # Prefetched batches of the abandoned epoch would delay the next one.
        ahead = 2 * PREFETCH * max(reading.workers, 1)
        time.sleep(min(_MOST_SETTLING_S, took_s * ahead / _COMPARED) if reading.workers else 0)
        return _loader_timed(loader, reading, world, window_s, share, first_batch_s, digests)
    finally:
        close = getattr(loader, "close", None)
        if close is not None:
            close()


def _beginning(loader: Loader, world: World) -> tuple[float, tuple[str, str], float]:
    """Read the first batches of an epoch: the time to the first, what they are, the time of the others."""
    begun_s = time.perf_counter()
    indices, values = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    batches = _endless(loader, 0)
    first = next(batches)
    _wait_for(world.device)
    first_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    numbered = False
    for micro in (first, *(next(batches) for _ in range(_COMPARED - 1))):
        numbered = numbered or bool(micro.indices)
        indices.update(repr(list(micro.indices)).encode())
        values.update(content_of(micro.batch))
    batches.close()
    digests = indices.hexdigest() if numbered else "", values.hexdigest()
    return first_s, digests, time.perf_counter() - begun_s


def _loader_timed(
    loader: Loader,
    reading: Reading,
    world: World,
    window_s: float,
    share: float,
    first_batch_s: float,
    digests: tuple[str, str],
) -> Visit:
    steps = loader.steps_in_epoch()
    begun_s = time.perf_counter()
    batches = _endless(loader, 1, begin=0 if steps is None else int(share * steps))
    next(batches)
    next_epoch_s = time.perf_counter() - begun_s
    once = max(1, reading.workers)  # each worker gives one batch
    for _ in range(once * PREFETCH):  # batches that were prefetched
        next(batches)
    guess_s = _turn(batches, once, world.device)[1]
    calls, turns = _agreed(guess_s, window_s, world)
    used = _Used()
    measured = [_turn(batches, once * calls, world.device) for _ in range(turns)]
    cores, threads = used.since()
    batches.close()
    return Visit(
        reading=reading,
        first_batch_s=first_batch_s,
        next_epoch_s=next_epoch_s,
        samples_s=tuple(samples / took_s for samples, took_s in measured),
        busy_cores=cores,
        busy_threads=threads,
        indices=digests[0],
        values=digests[1],
    )


def _agreed(guess_s: float, window_s: float, world: World) -> tuple[int, int]:
    """Return length and number of turns, the same on all ranks: streams read in lockstep."""
    longest_s = max(all_gather_object(guess_s, world))
    calls = max(1, math.ceil(_LEAST_TURN_S / max(longest_s, 1e-6)))
    turns = math.ceil(window_s / max(calls * longest_s, 1e-6))
    return calls, min(max(turns, _LEAST_TURNS), _MOST_TURNS)


def _turn(batches: Iterator[MicroBatch], count: int, device: torch.device) -> tuple[int, float]:
    """Read this many micro-batches; return their number of samples, and the time."""
    begun_s = time.perf_counter()
    samples = sum(next(batches).samples for _ in range(count))
    _wait_for(device)
    return max(samples, 1), time.perf_counter() - begun_s


def _endless(loader: Loader, epoch: int, *, begin: int = 0) -> Generator[MicroBatch, None, None]:
    """Yield the micro-batches of one epoch after the other."""
    while True:
        empty = True
        for step in loader.epoch(epoch, begin=begin):
            for micro in step:
                empty = False
                yield micro
        if empty and not begin:
            raise Impossible("the data has no samples", fix="check the source of its samples")
        epoch, begin = epoch + 1, 0


def content_of(batch: Any) -> bytes:
    """Return a digest of a batch: bytes of tensors, text of everything else."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors_in(batch):
        own = tensor.detach().cpu().contiguous()
        digest.update(f"{own.dtype} {tuple(own.shape)}".encode())
        digest.update(ctypes.string_at(own.data_ptr(), own.nbytes) if own.nbytes else b"")
    digest.update(repr(map_tensors(batch, lambda _: None)).encode())
    return digest.digest()


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class _Thread:
    process: int
    number: int


class _Used:
    """The CPU usage of this rank's workers, or of the rank itself without workers."""

    def __init__(self) -> None:
        self._begun_s = time.perf_counter()
        self._before = _cpu_s()

    def since(self) -> tuple[float | None, int | None]:
        """Return the cores used, and the maximum number of computing threads in one process."""
        after = _cpu_s()
        took_s = time.perf_counter() - self._begun_s
        if not after:
            return None, None
        used = {thread: cpu_s - self._before.get(thread, 0.0) for thread, cpu_s in after.items()}
        by_process: dict[int, list[float]] = {}
        for thread, cpu_s in used.items():
            by_process.setdefault(thread.process, []).append(cpu_s)
        return sum(used.values()) / took_s, max(map(_computing, by_process.values()))


def _computing(threads: Sequence[float]) -> int:
    """Return the number of threads with a relevant share of a process's work; at least 1."""
    least = max(_BUSY_SHARE * max(threads), _LEAST_CPU_S)
    return max(1, sum(one >= least for one in threads))


def _cpu_s() -> dict[_Thread, float]:
    """Return the CPU time of each thread; empty if the system does not report it."""
    own = psutil.Process()
    found: dict[_Thread, float] = {}
    try:
        for process in own.children(recursive=True) or [own]:
            for one in process.threads():
                found[_Thread(process.pid, one.id)] = one.user_time + one.system_time
    except (psutil.Error, OSError):
        return {}
    return found


def to_device(
    batch: Any, world: World, *, rounds: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the copy time of a batch from pageable and from pinned memory; empty on the CPU."""
    device = world.device
    if device.type == "cpu":
        return (), ()
    host = map_tensors(batch, lambda one: one.cpu())
    pinned = map_tensors(host, lambda one: one.pin_memory())
    taken = interleaved(
        {
            "ordinary": lambda: move_to_device(host, device),
            "pinned": lambda: move_to_device(pinned, device),
        },
        device=device,
        rounds=rounds,
    )
    return taken["ordinary"], taken["pinned"]
