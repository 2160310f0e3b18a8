"""What to say while the ranks say nothing: that they are starting, later only that they are alive."""

import re
import time
from collections.abc import Callable

from torchmuster.units import format_seconds

_STARTING_TOLD = 7
_LONG_S = 30.0
# What torch says while it starts does not show that a rank is at work.
_LIBRARY_WORDS = re.compile(r"\[[EFIW]\d{4} ")


class Silence:
    """Listens to the ranks of one attempt; asked every few seconds what there is to say."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = 0
        self._at_work = False
        self._heard_s = 0.0
        self._tell_after_s = _LONG_S

    def heard(self, text: str) -> None:
        """A rank wrote something."""
        self._heard_s = self._clock()
        self._at_work = self._at_work or not _LIBRARY_WORDS.match(text)

    def words(self) -> str:
        """Return what to say now, mostly nothing."""
        return self._of_ranks_at_work() if self._at_work else self._of_the_start()

    def _of_the_start(self) -> str:
        """Say what is waited for until the first rank prints; after a minute, only now and then."""
        self._asked += 1
        if self._asked <= _STARTING_TOLD:
            return "the ranks are starting; nothing was printed yet"
        if self._asked % 30:
            return ""
        return "the ranks are running; none of them has printed anything yet"

    def _of_ranks_at_work(self) -> str:
        """Tell of a silence twice as long as the last that was told; a quiet script is hardly disturbed."""
        silent_s = self._clock() - self._heard_s
        if silent_s < self._tell_after_s:
            return ""
        self._tell_after_s = 2 * silent_s
        return f"nothing was printed for {format_seconds(silent_s)}; the ranks are alive"
