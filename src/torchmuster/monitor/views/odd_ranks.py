"""The ranks that somebody should look at, in words."""

from collections.abc import Iterator, Sequence

from torchmuster.launch.hangs.pulse import Pulse

_MOST_NAMED = 8
# Ranks whose waiting differs by this share of the time wait for one among them.
_MUCH_WAITING = 0.2
_SILENT_S = 10.0


def odd_ranks(pulses: Sequence[Pulse]) -> Iterator[str]:
    """Name the rank that others wait for, and those that say nothing."""
    waits = {
        one.rank: one.communication_share for one in pulses if one.communication_share is not None
    }
    if len(waits) > 1:
        slowest = min(waits, key=lambda rank: waits[rank])
        if max(waits.values()) - waits[slowest] >= _MUCH_WAITING:
            yield f"the others wait for rank {slowest}"
    silent = [one.rank for one in pulses if one.silent_s > _SILENT_S]
    if silent:
        more = " …" if len(silent) > _MOST_NAMED else ""
        yield f"Python does not run in rank {', '.join(map(str, silent[:_MOST_NAMED]))}{more}"
