"""Limit the CPU use of background saves, because training steps need the same cores."""

import threading
import time

# Share of one core: steps during a save slow down by about as much. Without the limit they were 32 % (ddp) and 41 %
# (fsdp) slower (docs/validation.md).
_SHARE = 0.06


class Pace:
    """Limits the writing thread to a small share of a core, until another thread waits for it."""

    def __init__(self) -> None:
        self._used_s: float | None = None
        self._hurry = threading.Event()

    def hurry(self) -> None:
        """Stop pausing from now on."""
        self._hurry.set()

    def rest(self, _bytes: int = 0) -> None:
        """Pause in proportion to the work since the last pause; called by the writing thread."""
        used_s, before_s = time.thread_time(), self._used_s
        if before_s is not None:
            self._hurry.wait((used_s - before_s) * (1 / _SHARE - 1))
        self._used_s = time.thread_time()
