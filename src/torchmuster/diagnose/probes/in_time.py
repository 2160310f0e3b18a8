"""Communication between ranks outside the tested collectives: through their store, with a timeout.

A hung collective does not show which rank is missing; the store does.
"""

import json
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchmuster.launch.probes import process_group

Result = TypeVar("Result")


class Hangs(Exception):
    """Work did not finish in time."""


class Absent(Exception):
    """Ranks did not reach a stage in time."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"ranks {list(ranks)} did not arrive")
        self.ranks = tuple(ranks)


class ProbeHeartbeat:
    """Counts completed steps, to tell slow work from hung work."""

    def __init__(self) -> None:
        self.beats = 0

    def beat(self) -> None:
        """Record a completed step."""
        self.beats += 1


def in_time(
    work: Callable[[], Result], within_s: float, heartbeat: ProbeHeartbeat | None = None
) -> Result:
    """Return what ``work`` returns, raise what it raises, or raise ``Hangs`` after the timeout.

    With a heartbeat, the timeout restarts at every beat. A collective can block inside the call, so
    ``work`` runs in a separate thread; a hung one stays behind and dies with the process.
    """
    results: list[Result] = []
    errors: list[Exception] = []
    device = process_group.current_device() if dist.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                process_group.use_device(device)
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="in-time", daemon=True)
    thread.start()
    beats = None
    while thread.is_alive() and (heartbeat is None or heartbeat.beats != beats):
        beats = None if heartbeat is None else heartbeat.beats
        thread.join(within_s)
        if heartbeat is None:
            break
    if errors:
        raise errors.pop()  # a kept traceback would keep the process group alive
    if not results:
        raise Hangs(f"no answer within {within_s:g} s; a rank is missing, stuck or unreachable")
    return results[0]


class RankBarrier:
    """Shares values between ranks: each writes its own, all read all."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.heartbeat = ProbeHeartbeat()

    def share(self, name: str, value: Any, within_s: float) -> list[Any]:
        """Return what every rank shared under this name, by rank; each name can be used once."""
        shared = in_time(lambda: self._share(name, value, within_s), within_s + 1)
        self.heartbeat.beat()
        return shared

    def _share(self, name: str, value: Any, within_s: float) -> list[Any]:
        keys = [f"probe/{name}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], json.dumps(value))
        try:
            self._store.wait(keys, timedelta(seconds=within_s))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if not missing:  # the last one arrived just now
                return self._read(keys)
            raise Absent(missing) from error
        return self._read(keys)

    def _read(self, keys: list[str]) -> list[Any]:
        return [json.loads(text) for text in self._store.multi_get(keys)]
