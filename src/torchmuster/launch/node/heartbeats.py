"""The pulses of a machine's ranks: what each wrote down of itself, and what the system knows of it."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from torchmuster.launch.hangs.heartbeat import Pulse
from torchmuster.launch.node import process_state

# A rank that has not moved for so long may have its work done by others: compilers, data loaders.
_STILL_S = 3.0
_decode = msgspec.json.Decoder(Pulse).decode


class Pulses:
    """Reads the pulses of one attempt."""

    def __init__(
        self,
        records: Path,
        ranks: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = [records / f"rank-{rank}.pulse.json" for rank in ranks]
        self._clock = clock
        self._beats: dict[int, tuple[int, float]] = {}  # by process: the last, and since when
        self._moves: dict[int, tuple[int, float]] = {}
        self._load = process_state.Load(clock)

    def read(self) -> tuple[Pulse, ...]:
        """Return the newest pulse of every rank that has one."""
        told = [pulse for path in self._paths if (pulse := _read(path)) is not None]
        stats = {pulse.pid: process_state.look_at(pulse.pid) for pulse in told}
        still = [
            one.pid
            for one in told
            if self._unchanged_s(self._moves, one.pid, one.moves) >= _STILL_S
        ]
        busy = self._load.take(stats, with_children=still)
        return tuple(
            msgspec.structs.replace(
                pulse,
                state=process_state.GONE if (stat := stats[pulse.pid]) is None else stat.state,
                busy=busy.get(pulse.pid),
                memory_bytes=None if stat is None else stat.memory_bytes,
                silent_s=round(self._unchanged_s(self._beats, pulse.pid, pulse.beat), 1),
            )
            for pulse in told
        )

    def _unchanged_s(self, known: dict[int, tuple[int, float]], pid: int, count: int) -> float:
        """Return for how long a process has told the same number."""
        now = self._clock()
        before, since_s = known.get(pid, (None, now))
        if before != count:
            known[pid] = (count, now)
            return 0.0
        return now - since_s


def _read(path: Path) -> Pulse | None:
    try:
        return _decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):  # none yet, or its disk is full
        return None
