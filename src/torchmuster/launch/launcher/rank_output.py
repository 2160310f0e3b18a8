"""What the ranks print, on its way to the console, and what the launcher prints while they print nothing.

When a rank fails, its peers lose their connection to it and print tracebacks too. The failure report shows the traceback
of the cause once; the others stay in the ranks' logs. So a traceback is held back until it is clear whether the run fails because
of it; that of a rank that goes on is shown.
"""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.units import format_seconds, rank_text

# A rank that fails exits soon after its traceback.
_FAILS_WITHIN_S = 10.0
_BEGINNING = re.compile(r"^(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):\s*$")
# Lines that torch's libraries print while a process starts or exits: they do not show that a rank is working.
_LIBRARY_LINE = re.compile(r"(?:\[rank\d+\]:)?\[[EFIW]\d{4} ")
# Silence is reported after this long, before and after the first output of a rank.
_SILENT_AT_FIRST_S, _SILENT_S = 20.0, 30.0
_GROUPS_SHOWN = 3
_EXITED = ("X", "Z")


@dataclass
class _HeldLines:
    began_s: float
    lines: list[str] = field(default_factory=list)


class ShownOutput:
    """Passes on what the ranks of one attempt print, except tracebacks that may be those of a failure."""

    def __init__(
        self, show: Callable[[int, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._show = show
        self._clock = clock
        self._held: dict[int, _HeldLines] = {}
        self._is_at_work = False  # a rank has printed something
        self._heard_s = clock()
        self._report_after_s = _SILENT_AT_FIRST_S

    def add(self, rank: int, text: str) -> None:
        """Take in whole lines that a rank printed."""
        self._end_silence(text)
        shown = []
        for line in text.splitlines(keepends=True):
            held = self._held.get(rank)
            if held is None and _BEGINNING.match(line):
                held = self._held[rank] = _HeldLines(self._clock())
            if held is None:
                shown.append(line)
            else:
                held.lines.append(line)
        if shown:
            self._show(rank, "".join(shown))

    def show_due(self) -> None:
        """Show the tracebacks of ranks that go on; call it about every second."""
        for rank, held in list(self._held.items()):
            if self._clock() - held.began_s >= _FAILS_WITHIN_S:
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

    def _end_silence(self, text: str) -> None:
        if not self._is_at_work and not _LIBRARY_LINE.match(text):
            self._is_at_work = True
            self._report_after_s = _SILENT_S
        if self._is_at_work:
            self._heard_s = self._clock()

    def silence_text(self, heartbeats: Iterable[Heartbeat]) -> str:
        """Return what to print if no rank has printed anything for long, else "". Each report comes when the silence has doubled."""
        silent_s = self._clock() - self._heard_s
        if silent_s < self._report_after_s:
            return ""
        self._report_after_s = 2 * silent_s
        doing = activity_text(heartbeats, together="all ranks: ")
        unknown = "the ranks are alive" if self._is_at_work else "the ranks are starting"
        return f"no output for {format_seconds(silent_s)}; {doing or unknown}"


def activity_text(heartbeats: Iterable[Heartbeat], *, together: str = "") -> str:
    """Return ``rank 0: barrier at train.py:9; rank 1: …``; "" if nothing is known.

    If all ranks do the same, return ``barrier at train.py:9`` after the text ``together``.
    """
    groups: dict[str, list[int]] = {}
    for heartbeat in heartbeats:
        if heartbeat.state not in _EXITED:
            groups.setdefault(_activity(heartbeat), []).append(heartbeat.rank)
    if len(groups) == 1:
        (doing,) = groups
        return f"{together}{doing}" if doing else ""
    shown = [f"{rank_text(ranks)}: {doing}" for doing, ranks in groups.items() if doing]
    more = [f"{len(shown) - _GROUPS_SHOWN} more"] if len(shown) > _GROUPS_SHOWN else []
    return "; ".join([*shown[:_GROUPS_SHOWN], *more])


def _activity(heartbeat: Heartbeat) -> str:
    step = "" if heartbeat.step is None else f"step {heartbeat.step}"
    doing = ", ".join(filter(None, (heartbeat.phase or heartbeat.doing, step)))
    return f"{doing} at {heartbeat.place}".strip() if heartbeat.place else doing
