"""Stack and flight recorder dumps of ranks that run here."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from torchmuster.launch import protocol
from torchmuster.launch.node import heartbeats
from torchmuster.launch.node.ranks import RankProcess
from torchmuster.launch.rank.heartbeat import STACKS_SIGNAL

_ANSWER_WITHIN_S = 5.0
_SIGNAL_WITHIN_S = 1.0
_LOOK_EVERY_S = 0.1
_LONGEST_STACKS = 200_000
_LONGEST_FLIGHT = 1_500_000


async def dump_stacks(records: Path, ranks: Sequence[RankProcess]) -> Iterator[protocol.Output]:
    """Return the stack dumps of these ranks."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            _request(records, rank).touch()
    silent = await _wait_until(
        lambda rank: not _request(records, rank).exists(), ranks, _ANSWER_WITHIN_S
    )
    signalled = [rank for rank in silent if _signal(rank)]
    await _wait_until(lambda rank: bool(_native_stacks(records, rank)), signalled, _SIGNAL_WITHIN_S)
    return _evidence(records, ranks, silent)


async def _wait_until(
    done: Callable[[RankProcess], bool], ranks: Iterable[RankProcess], within_s: float
) -> list[RankProcess]:
    """Wait until all ranks are done; return those that are not after ``within_s``."""
    deadline = time.monotonic() + within_s
    while left := [rank for rank in ranks if not done(rank)]:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    return left


def _evidence(
    records: Path, ranks: Iterable[RankProcess], silent: Sequence[RankProcess]
) -> Iterator[protocol.Output]:
    for rank in ranks:
        if rank in silent:
            text = _without_python(records, rank)
            yield protocol.Output(rank=rank.rank, file="stacks.txt", text=text)
            continue
        stacks = _read(records / f"rank-{rank.rank}.stacks.txt")[:_LONGEST_STACKS]
        yield protocol.Output(rank=rank.rank, file="stacks.txt", text=stacks)
        flight = _read(records / f"rank-{rank.rank}.flight.json")
        if 0 < len(flight) <= _LONGEST_FLIGHT:
            yield protocol.Output(rank=rank.rank, file="flight.json", text=flight)


def _without_python(records: Path, rank: RankProcess) -> str:
    """Return what is known of a rank in which no Python code can run."""
    stacks = _native_stacks(records, rank)
    process = heartbeats.read_process(rank.pid)
    lines = [
        f"rank {rank.rank}, process {rank.pid}",
        "Python code cannot run in this process, so it did not answer",
        "its process is gone" if process is None else f"process state: {process.state}",
        f"its stacks, innermost call first:\n{stacks}" if stacks else "no stacks available",
    ]
    return "\n".join(lines)[:_LONGEST_STACKS]


def _signal(rank: RankProcess) -> bool:
    """Request the stacks by signal; only if the process handles it, as it would kill others."""
    if STACKS_SIGNAL is None or not rank.handles(STACKS_SIGNAL):
        return False
    rank.send_signal(STACKS_SIGNAL)
    return True


def _request(records: Path, rank: RankProcess) -> Path:
    return records / f"rank-{rank.rank}.examine"


def _native_stacks(records: Path, rank: RankProcess) -> str:
    return _read(records / f"rank-{rank.rank}.faults.txt")[-_LONGEST_STACKS:]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
