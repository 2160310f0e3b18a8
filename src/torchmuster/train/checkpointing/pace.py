"""How fast a save is written beside a training whose steps need the same cores."""

import threading
import time

# Of one core: steps beside a save become slower by about as much.
_SHARE = 0.06


class Pace:
    """Lets the thread that writes use a small share of a core, until somebody waits for it."""

    def __init__(self) -> None:
        self._used_s: float | None = None
        self._hurry = threading.Event()

    def hurry(self) -> None:
        """Go on without pauses from now on."""
        self._hurry.set()

    def rest(self, _bytes: int = 0) -> None:
        """Pause for as long as what was done since the last pause asks for; the thread calls it."""
        used_s, before_s = time.thread_time(), self._used_s
        if before_s is not None:
            self._hurry.wait((used_s - before_s) * (1 / _SHARE - 1))
        self._used_s = time.thread_time()
