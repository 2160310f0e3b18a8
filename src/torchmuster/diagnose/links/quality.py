"""Links that work and hurt: data that stalls or is changed on the way, loss, long ways, slow ones.

Of what is wrong with a link only the first in the order of ``_FAULTS`` is said, for the rest follows
from it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchmuster.diagnose.links.culprits import grouped
from torchmuster.diagnose.links.model import Figures, Link
from torchmuster.diagnose.links.wording import WORDINGS, Wording
from torchmuster.finding import Finding, Status

LOSSY = 0.01
FAR_S = 0.010
# Shorter round trips are not worth a word, however they compare with the others.
_NEAR_S, _TIMES_FARTHER = 0.001, 5
# What is slower hurts any training; what is faster than the second is more than we can measure.
SLOW_BYTES_PER_S, _FAST_BYTES_PER_S = 250e6 / 8, 1e9
_TIMES_SLOWER = 4
# A machine that is kept waiting for longer than that is not believed to be faster still.
_MOST_WAITING = 0.95
_LINES_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """A way in which a link can be bad; its words are in ``wording.py``."""

    name: str
    is_bad: Callable[[Link, "_Usual"], bool]
    is_sure: Callable[[Link], bool] = lambda link: False  # no second try can change it

    @property
    def wording(self) -> Wording:
        return next(one for one in WORDINGS if one.name == self.name)


@dataclass(frozen=True, kw_only=True)
class _Usual:
    """What the links of this group are usually like."""

    bytes_per_s: float
    round_trip_s: float
    back: dict[tuple[int, int], Figures]


def findings(links: Sequence[Link]) -> list[Finding]:
    """Return a finding for each fault that measured links have, and each machine to blame for it."""
    found = []
    for fault, bad in _faulty(links):
        words = fault.wording
        for group in grouped(bad, _measured(links)):
            lines = [f"{one.name}: {words.told(one)}" for one in group.links[:_LINES_SHOWN]]
            if len(group.links) > _LINES_SHOWN:
                lines.append(f"and {len(group.links) - _LINES_SHOWN:,} more")
            found.append(
                Finding(
                    name=words.name,
                    status=words.status,
                    what=words.what(group),
                    why=words.why,
                    fix=words.fix(group),
                    evidence="\n".join(lines),
                )
            )
    return found


def suspects(links: Sequence[Link]) -> list[tuple[int, int]]:
    """Return the pairs that are worth another try: a busy machine may be all that is wrong."""
    pairs = {
        (min(one.places), max(one.places))
        for fault, bad in _faulty(links)
        if fault.wording.status is not Status.NOTE
        for one in bad
        if not fault.is_sure(one)
    }
    return sorted(pairs)


def _faulty(links: Sequence[Link]) -> list[tuple[_Fault, list[Link]]]:
    measured = _measured(links)
    usual = _usual(measured)
    found: list[tuple[_Fault, list[Link]]] = []
    said: set[frozenset[int]] = set()
    for fault in _FAULTS:
        bad = [
            one
            for one in measured
            if frozenset(one.places) not in said and fault.is_bad(one, usual)
        ]
        said |= {frozenset(one.places) for one in bad}
        if bad:
            found.append((fault, bad))
    return found


def _measured(links: Sequence[Link]) -> list[Link]:
    return [one for one in links if one.tries]


def _usual(links: Sequence[Link]) -> _Usual:
    rates = [_capped(one.figures) for one in links if one.figures and one.figures.bytes_per_s]
    trips = [one.figures.round_trip_s for one in links if one.figures and one.figures.round_trip_s]
    return _Usual(
        bytes_per_s=statistics.median(rates) if rates else 0.0,
        round_trip_s=statistics.median(trips) if trips else 0.0,
        back={
            (one.target.place, one.source.place): one.figures
            for one in links
            if one.figures is not None
        },
    )


def _capped(figures: Figures) -> float:
    return min(figures.bytes_per_s or 0.0, _FAST_BYTES_PER_S)


# ---- what is bad


def _corrupts(link: Link, usual: _Usual) -> bool:
    return link.figures is not None and link.figures.wrong_bytes > 0


def _swallows_big_frames(link: Link, usual: _Usual) -> bool:
    figures = link.figures
    return figures is not None and figures.stalled and _sends_bigger_than_passes(link, usual)


def _stalls_without_a_reason(link: Link, usual: _Usual) -> bool:
    # Where datagrams are not let through, that it stalls is all that can be known.
    figures = link.figures
    return figures is not None and figures.stalled and figures.frame_bytes is None


def _drops(link: Link, usual: _Usual) -> bool:
    return link.dropped > 0 or link.figures is None


def _loses(link: Link, usual: _Usual) -> bool:
    return link.figures is not None and (link.figures.loss or 0.0) >= LOSSY


def _is_far(link: Link, usual: _Usual) -> bool:
    trip_s = link.figures.round_trip_s if link.figures is not None else None
    if trip_s is None:
        return False
    return trip_s > FAR_S or trip_s > max(_NEAR_S, _TIMES_FARTHER * usual.round_trip_s)


def _is_slow(link: Link, usual: _Usual) -> bool:
    figures = link.figures
    if figures is None:
        return False
    if figures.stalled:  # and big frames do arrive
        return True
    freed, back = _freed(figures), usual.back.get(link.places)
    compared = max(usual.bytes_per_s, _capped(back) if back else 0.0) / _TIMES_SLOWER
    if _sends_bigger_than_passes(link, usual):  # which alone makes it slower than the others
        compared = 0.0
    slow_anywhere = (figures.bytes_per_s or 0.0) < SLOW_BYTES_PER_S
    return freed < compared or (slow_anywhere and freed < _TIMES_SLOWER * SLOW_BYTES_PER_S)


def _freed(figures: Figures) -> float:
    """Return how fast it could have been at most if the machines had had nothing else to do."""
    return (figures.bytes_per_s or 0.0) / (1 - min(figures.waited_share, _MOST_WAITING))


def _sends_bigger_than_passes(link: Link, usual: _Usual) -> bool:
    figures = link.figures
    if figures is None or figures.frame_bytes is None or figures.frame_tried_bytes is None:
        return False
    return figures.frame_bytes < figures.frame_tried_bytes


# ---- what is beyond doubt


def _is_very_far(link: Link) -> bool:
    return link.figures is not None and (link.figures.round_trip_s or 0.0) > _TIMES_FARTHER * FAR_S


_FAULTS = (
    _Fault(name="corrupting-link", is_bad=_corrupts),
    _Fault(name="mtu-black-hole", is_bad=_swallows_big_frames, is_sure=lambda link: True),
    _Fault(name="stalled-link", is_bad=_stalls_without_a_reason),
    _Fault(name="flapping-link", is_bad=_drops),
    _Fault(name="lossy-link", is_bad=_loses),
    _Fault(name="high-latency", is_bad=_is_far, is_sure=_is_very_far),
    _Fault(name="slow-link", is_bad=_is_slow),
    _Fault(name="mtu-differs", is_bad=_sends_bigger_than_passes),
)
