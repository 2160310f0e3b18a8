"""The ranks that somebody should look at: the one that all others wait for, those in which Python does not run."""

from collections.abc import Iterator, Sequence

from torchmuster.launch.hangs.heartbeat import Pulse

_MOST_NAMED = 8
# Ranks whose waiting differs by this share of the time wait for one among them.
_MUCH_WAITING = 0.2
SILENT_AFTER_S = 10.0


def odd_ranks(pulses: Sequence[Pulse]) -> Iterator[str]:
    """Name them, in words."""
    slowest = held_up_by(pulses)
    if slowest is not None:
        yield f"the others wait for rank {slowest}"
    silent = [one.rank for one in pulses if one.silent_s > SILENT_AFTER_S]
    if silent:
        more = " …" if len(silent) > _MOST_NAMED else ""
        yield f"Python does not run in rank {', '.join(map(str, silent[:_MOST_NAMED]))}{more}"


def held_up_by(pulses: Sequence[Pulse]) -> int | None:
    """Return the rank that the others wait for: under gradient averaging it is the one that waits least."""
    waits = {
        one.rank: one.communication_share for one in pulses if one.communication_share is not None
    }
    if len(waits) < 2:
        return None
    slowest = min(waits, key=lambda rank: waits[rank])
    return slowest if max(waits.values()) - waits[slowest] >= _MUCH_WAITING else None
