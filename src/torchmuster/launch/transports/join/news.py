"""News about what happens at the door, at a rate that nobody from outside can drive up."""

import asyncio
from collections.abc import Callable


class News:
    """Passes the first of a kind on at once, and counts what follows until the interval is over."""

    def __init__(self, tell: Callable[[str], None], every_s: float) -> None:
        self._tell = tell
        self._every_s = every_s
        self._held: dict[str, tuple[int, str]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def note(self, kind: str, source: str) -> None:
        """Note that something happened: ``a wrong join code``, from whom."""
        if kind in self._timers:
            self._held[kind] = self._held.get(kind, (0, ""))[0] + 1, source
        else:
            self._tell(f"refused {kind} from {source}")
            self._wait(kind)

    def _wait(self, kind: str) -> None:
        loop = asyncio.get_running_loop()
        self._timers[kind] = loop.call_later(self._every_s, self._interval_over, kind)

    def _interval_over(self, kind: str) -> None:
        del self._timers[kind]
        if kind in self._held:
            count, source = self._held.pop(kind)
            self._tell(
                f"refused {kind} {count} more times within {self._every_s:g} s, "
                f"the last time from {source}"
            )
            self._wait(kind)

    def close(self) -> None:
        """Say no more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
