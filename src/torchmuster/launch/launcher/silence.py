"""What the launcher prints while no rank prints anything: what the ranks are doing, less and less often."""

import re
import time
from collections.abc import Callable, Iterable

from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.launcher.console import rank_text
from torchmuster.units import format_seconds

_FIRST_S = 20.0
_LONG_S = 30.0
_GROUPS_SHOWN = 3
_EXITED = ("X", "Z")
# torch's log lines during start-up do not show that a rank is working.
_LIBRARY_WORDS = re.compile(r"\[[EFIW]\d{4} ")


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
    return f"{doing}{f' at {heartbeat.place}' if heartbeat.place else ''}".strip()


class SilenceWatch:
    """Track how long the ranks of one attempt have printed nothing; polled every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at_work = False
        self._heard_s = clock()
        self._tell_after_s = _FIRST_S

    def heard(self, text: str) -> None:
        """Record that a rank printed something."""
        if not self._at_work and not _LIBRARY_WORDS.match(text):
            self._at_work = True
            self._tell_after_s = _LONG_S
        if self._at_work:
            self._heard_s = self._clock()

    def words(self, heartbeats: Iterable[Heartbeat] = ()) -> str:
        """Return the message to print now, usually "".

        Each later message comes when the silence is twice as long.
        """
        silent_s = self._clock() - self._heard_s
        if silent_s < self._tell_after_s:
            return ""
        self._tell_after_s = 2 * silent_s
        doing = activity_text(heartbeats, together="all ranks: ")
        if not self._at_work:
            return f"no output for {format_seconds(silent_s)}; {doing or 'the ranks are starting'}"
        return f"no output for {format_seconds(silent_s)}; {doing or 'the ranks are alive'}"
