"""Watch the borrowed GPUs of a run: stop its ranks when another user requests GPUs, or when more are idle.

Ranks of ``muster train`` save a checkpoint when they are stopped, and the launcher starts as many as there are GPUs then.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from torchmuster.devices import snapshot
from torchmuster.devices.borrow import DeviceRange
from torchmuster.devices.model import Device
from torchmuster.devices.request import GIVEN_BACK_WITHIN_S
from torchmuster.launch import protocol
from torchmuster.launch.node.attempt import RunningAttempt

_LOOK_EVERY_S = 1.0
_LOOK_FOR_MORE_EVERY_S = 10.0
# Ranks that have not saved by then are killed; noticing the request and killing them take the rest of the time.
RETURN_GRACE_S = GIVEN_BACK_WITHIN_S - 10.0
# Ranks that take longer to save before they use more GPUs continue without them.
_GROW_WITHIN_S = 120.0
_WARNING = "SIGUSR1"


@dataclass(kw_only=True)
class _PendingChange:
    """A change of the run's GPUs that takes effect when its ranks have exited."""

    since_s: float
    reason: str
    returned: tuple[Device, ...] = ()
    added: tuple[Device, ...] = ()


class BorrowingWatch:
    """Decides when a run gives GPUs back or uses more, and stops its ranks for that."""

    def __init__(
        self,
        devices: DeviceRange,
        running: Callable[[], RunningAttempt | None],
        *,
        borrow_every_s: float,
    ) -> None:
        self._devices = devices
        self._running = running
        self._borrow_every_s = borrow_every_s
        self._pending: _PendingChange | None = None
        self._changed_s = self._looked_s = time.monotonic()
        self._is_starting = True  # the launcher relies on the number of GPUs that it was told

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            with contextlib.suppress(
                Exception
            ):  # whatever cannot be read now may be readable later
                await self.look()

    def prepared(self) -> protocol.DevicesChange | None:
        """Keep the GPUs until the ranks run; return what has changed since they exited."""
        self._is_starting = True
        return self._settle()

    def exited(self) -> protocol.DevicesChange | None:
        """Release the GPUs that are given back, as the ranks have exited; return what changes."""
        self._is_starting = False
        return self._settle()

    def _settle(self) -> protocol.DevicesChange | None:
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        self._devices.release(pending.returned)
        now_s = self._changed_s = time.monotonic()
        return protocol.DevicesChange(
            given_back=tuple(one.label for one in pending.returned),
            borrowed=tuple(one.label for one in pending.added),
            reason=pending.reason,
            seconds=round(now_s - pending.since_s, 3),
        )

    async def look(self) -> None:
        """Look once for requests and idle GPUs, and stop the ranks if their number must change."""
        running, began_s = self._running(), time.monotonic()
        if running is None and self._is_starting:
            return
        if self._pending is None or not self._pending.returned:
            asked = await asyncio.to_thread(self._devices.find_returns, snapshot.take_snapshot)
            if self._running() is not running:
                return
            if asked.value:
                self._give_back(asked.value, asked.reason, running, began_s)
                return
        if running is None:
            return
        if not running.handles(_WARNING):
            self._changed_s = began_s  # its ranks are still starting
        if self._pending is None and self._is_time_to_look_for_more(began_s):
            self._looked_s = began_s
            is_due = began_s - self._changed_s >= self._borrow_every_s
            idle_for_s = self._borrow_every_s if is_due else math.inf
            more = await asyncio.to_thread(
                self._devices.extend, snapshot.take_snapshot, idle_for_s=idle_for_s
            )
            if more.value:
                self._pending = _PendingChange(
                    since_s=time.monotonic(), reason=more.reason, added=more.value
                )
        self._press(running)

    def _give_back(
        self,
        returned: tuple[Device, ...],
        reason: str,
        running: RunningAttempt | None,
        since_s: float,
    ) -> None:
        added = self._pending.added if self._pending is not None else ()
        self._devices.release([one for one in returned if one in added])  # no rank uses them
        used = tuple(one for one in returned if one not in added)
        self._pending = _PendingChange(
            since_s=since_s,
            reason=reason,
            returned=used,
            added=tuple(one for one in added if one not in returned),
        )
        if running is None:
            self._devices.release(used)
        elif used:
            running.stop(RETURN_GRACE_S)

    def _is_time_to_look_for_more(self, now_s: float) -> bool:
        every_s = min(_LOOK_FOR_MORE_EVERY_S, self._borrow_every_s)
        return not self._devices.has_all and now_s - self._looked_s >= every_s

    def _press(self, running: RunningAttempt) -> None:
        """Ask the ranks to save and exit; those that have no handler yet are asked again."""
        pending = self._pending
        if pending is None or pending.returned:
            return
        if time.monotonic() - pending.since_s <= _GROW_WITHIN_S:
            running.warn(_WARNING)
            return
        self._devices.release(pending.added)
        self._pending, self._changed_s = None, time.monotonic()
