"""Hold back the tracebacks of ranks until it is clear whether the run fails because of them.

When a rank fails, its peers lose their connection to it and print tracebacks too. The failure report shows the traceback
of the cause once; the others stay in the ranks' logs. A traceback of a rank that goes on is shown.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# A rank that fails exits soon after its traceback; one that prints more goes on.
_FAILS_WITHIN_S = 10.0
_GOES_ON_AFTER_S = 3.0
_BEGINNING = re.compile(r"^(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):\s*$")
# Lines that torch's libraries print while a process exits.
_LIBRARY_LINE = re.compile(r"(?:\[rank\d+\]:)?\[[EFIW]\d{4} ")


@dataclass
class _HeldLines:
    began_s: float
    lines: list[str] = field(default_factory=list)


class TracebackFilter:
    """Passes on what ranks print, except tracebacks that may be those of a failure."""

    def __init__(
        self, show: Callable[[int, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._show = show
        self._clock = clock
        self._held: dict[int, _HeldLines] = {}

    def output(self, rank: int, text: str) -> None:
        """Take in whole lines that a rank printed."""
        shown = []
        for line in text.splitlines(keepends=True):
            held = self._held.get(rank)
            if held is None and _BEGINNING.match(line):
                held = self._held[rank] = _HeldLines(self._clock())
            if held is None:
                shown.append(line)
                continue
            held.lines.append(line)
        if shown:
            self._show(rank, "".join(shown))

    def show_due(self) -> None:
        """Show the tracebacks of ranks that go on; call it about every second."""
        now_s = self._clock()
        for rank, held in list(self._held.items()):
            age_s = now_s - held.began_s
            has_more = age_s >= _GOES_ON_AFTER_S and _prints_more(held.lines)
            if has_more or age_s >= _FAILS_WITHIN_S:
                self._release(rank)

    def show_all(self) -> None:
        """Show what is held: the run did not fail."""
        for rank in list(self._held):
            self._release(rank)

    def drop(self) -> None:
        """Forget what is held: the run failed, and its report shows the cause."""
        self._held.clear()

    def _release(self, rank: int) -> None:
        self._show(rank, "".join(self._held.pop(rank).lines))


def _prints_more(lines: list[str]) -> bool:
    """Return whether a rank printed something after its traceback."""
    has_ended = False
    for line in lines:
        if _BEGINNING.match(line) or not line.strip():  # another exception may follow
            has_ended = False
        elif not line[0].isspace() and not _LIBRARY_LINE.match(line):
            if has_ended:
                return True
            has_ended = True
    return False
