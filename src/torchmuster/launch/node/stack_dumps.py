"""Having ranks show what they are doing: all stacks, and what torch wrote down of their collectives.

A rank's own thread shows that (``hangs/rank_pulse.py``). One in which Python cannot run, because native code
does not let go of its lock, is asked by a signal, upon which the interpreter's fault handler writes the
stacks. One that is stopped, or sits in the kernel, shows nothing: then what the system knows of it is told.
"""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torchmuster.launch import protocol
from torchmuster.launch.node import process_state
from torchmuster.launch.rank.heartbeat import STACKS_SIGNAL

_ANSWER_WITHIN_S = 5.0
_SIGNAL_WITHIN_S = 1.0
_LOOK_EVERY_S = 0.1
_LONGEST_STACKS = 200_000
_LONGEST_FLIGHT = 1_500_000
_THREADS_SHOWN = 200
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)", re.MULTILINE)


async def examine(
    records: Path, pids: dict[int, int], ranks: Iterable[int]
) -> Iterator[protocol.Evidence]:
    """Return what these ranks show, as far as they run here; ``pids`` are their processes."""
    asked = [rank for rank in ranks if rank in pids]
    for rank in asked:
        with contextlib.suppress(OSError):
            _request(records, rank).touch()
    silent = await _wait(lambda rank: not _request(records, rank).exists(), asked, _ANSWER_WITHIN_S)
    signalled = [rank for rank in silent if _signal(pids[rank])]
    await _wait(lambda rank: bool(_faults(records, rank)), signalled, _SIGNAL_WITHIN_S)
    return _evidence(records, pids, asked, silent)


async def _wait(done: Callable[[int], bool], ranks: Iterable[int], within_s: float) -> list[int]:
    """Wait until all are done; return those that are not when the time is up."""
    deadline = time.monotonic() + within_s
    while left := [rank for rank in ranks if not done(rank)]:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    return left


def _evidence(
    records: Path, pids: dict[int, int], asked: Iterable[int], silent: Iterable[int]
) -> Iterator[protocol.Evidence]:
    for rank in asked:
        if rank in silent:
            why = "Python cannot run in it at the moment, so it did not answer"
            stacks = _faults(records, rank)
            shown = (
                f"its stacks, innermost call first:\n{stacks}" if stacks else "it shows no stacks"
            )
            text = f"rank {rank}, process {pids[rank]}\n{why}\n{of_system(pids[rank])}\n{shown}"
            yield protocol.Evidence(rank=rank, name="stacks.txt", text=text[:_LONGEST_STACKS])
            continue
        stacks = _text(records / f"rank-{rank}.stacks.txt")[:_LONGEST_STACKS]
        yield protocol.Evidence(rank=rank, name="stacks.txt", text=stacks)
        flight = _text(records / f"rank-{rank}.flight.json")
        if 0 < len(flight) <= _LONGEST_FLIGHT:
            yield protocol.Evidence(rank=rank, name="flight.json", text=flight)


def of_system(pid: int) -> str:
    """Return what the system knows of a process and its threads: in which state, waiting for what."""
    stat = process_state.look_at(pid)
    if stat is None:
        return "its process has gone"
    lines = [f"the state of its process: {stat.state}"]
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir())[:_THREADS_SHOWN]:
            name, where = _text(task / "comm").strip(), _text(task / "wchan").strip()
            lines.append(
                f"thread {task.name} {name}: in {where if where not in ('', '0') else '-'}"
            )
    if kernel := _text(Path(f"/proc/{pid}/stack")).strip():  # only root may read it
        lines.append(f"in the kernel:\n{kernel}")
    return "\n".join(lines)


def _signal(pid: int) -> bool:
    """Ask for the stacks by signal; only a process that is ready for it, which another would die of."""
    caught = _CAUGHT.search(_text(Path(f"/proc/{pid}/status")))
    if STACKS_SIGNAL is None or caught is None or not int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1:
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACKS_SIGNAL)
        return True
    return False


def _request(records: Path, rank: int) -> Path:
    return records / f"rank-{rank}.examine"


def _faults(records: Path, rank: int) -> str:
    return _text(records / f"rank-{rank}.faults.txt")[-_LONGEST_STACKS:]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
