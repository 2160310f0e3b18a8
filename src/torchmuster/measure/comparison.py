"""Two sides of records of one bench: what got better, what got worse, and what is within the noise.

One process is one sample. Where its memory lies and which core it is on make all of its figures a little larger or
smaller together, so many samples of one process say little about the next one. With several records on each
side, each counts once, by its median, and the spread between records is the noise. With too few of them that spread
is unknown: then all their samples are compared, and only a change beyond ``FLOOR`` counts.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.errors import Impossible
from torchmuster.measure.record import BenchRecord, Series
from torchmuster.measure.statistics import Shift, fewest, shift

# That nothing at all is called changed where nothing did, over all series together.
CONFIDENCE = 0.99
# Where code and data lie in memory alone moves figures by this much: less is no news, however certain.
LEAST = 0.01
# Of one process nobody knows how far it is from the next; only what is beyond this counts.
FLOOR = 0.10
_EXACT = ("B", "1")  # what is counted or computed can be the same every time; a time cannot

Verdict = Literal["better", "worse", "within noise", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One series on both sides. ``change`` 0.03 is 3 % more, whether that is good or bad; the interval is around it."""

    series: Series  # as the first record has it
    before: float
    after: float
    change: float
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came of comparing two sides."""

    changes: tuple[Change, ...]
    left_out: tuple[str, ...]  # titles of series that not every record has
    by_records: bool  # each record counted once; else their samples, with FLOOR
    records_needed: int  # on each side, so that a change can be certain

    @property
    def floor(self) -> float:
        """The least change that counts."""
        return LEAST if self.by_records else FLOOR

    def would_be_seen(self, change: Change) -> float:
        """Return how large a change of a series must be to count here, beside all that are compared."""
        return max(self.floor, change.high - change.change, change.change - change.low)


def compare(a: Sequence[BenchRecord], b: Sequence[BenchRecord]) -> Comparison:
    """Compare the records ``b`` with the records ``a``, which were there before."""
    benches = sorted({one.bench for one in (*a, *b)})
    if len(benches) > 1:
        raise Impossible(
            "cannot compare these records",
            why=f"they are of different benches: {', '.join(benches)}",
            fix="give records of one bench on both sides",
        )
    before, after = _by_key(a), _by_key(b)
    shared = [
        key
        for key, some in before.items()
        if len(some) == len(a) and len(after.get(key, ())) == len(b)
    ]
    if not shared:
        raise Impossible(
            "cannot compare these records",
            why="not one series is in all of them: their names and labels differ",
            fix="measure both sides with the same flags",
        )
    needed = fewest(len(shared), confidence=CONFIDENCE)
    by_records = min(len(a), len(b)) >= needed
    return Comparison(
        changes=tuple(
            _change(before[key], after[key], by_records=by_records, compared=len(shared))
            for key in shared
        ),
        left_out=tuple(
            some[0].title for key, some in {**after, **before}.items() if key not in shared
        ),
        by_records=by_records,
        records_needed=needed,
    )


def _by_key(records: Sequence[BenchRecord]) -> dict[object, list[Series]]:
    found: dict[object, list[Series]] = {}
    for record in records:
        for series in record.series:
            found.setdefault(series.key, []).append(series)
    return found


def _change(
    before: Sequence[Series], after: Sequence[Series], *, by_records: bool, compared: int
) -> Change:
    series = before[0]
    a, b = (_values(side, by_records=by_records) for side in (before, after))
    confidence = 1 - (1 - CONFIDENCE) / compared
    found = _relative_shift(a, b, exact=series.unit in _EXACT, confidence=confidence)
    verdict: Verdict = "within noise"
    if not math.isfinite(found.high - found.low):
        verdict = "unknown"
    elif (found.low > 0 or found.high < 0) and abs(found.middle) > (LEAST if by_records else FLOOR):
        verdict = "better" if (found.middle > 0) == (series.better == "higher") else "worse"
    return Change(
        series=series,
        before=statistics.median(a),
        after=statistics.median(b),
        change=found.middle,
        low=found.low,
        high=found.high,
        verdict=verdict,
    )


def _values(side: Sequence[Series], *, by_records: bool) -> list[float]:
    if by_records:
        return [statistics.median(one.samples) for one in side]
    return [sample for one in side for sample in one.samples]


def _relative_shift(
    a: Sequence[float], b: Sequence[float], *, exact: bool, confidence: float
) -> Shift:
    """Return by which share ``b`` is more than ``a``, with its interval; unbounded where it cannot be known."""
    first, last = statistics.median(a), statistics.median(b)
    if exact and len({*a}) == len({*b}) == 1:
        # What is the same every time needs no test: it changed, or it did not.
        share = 0.0 if first == last else (last / first - 1 if first else math.inf)
        return Shift(middle=share, low=share, high=share)
    if min(*a, *b) <= 0:  # no shares of what may be nothing
        share = last / first - 1 if first else math.nan
        return Shift(middle=share, low=-math.inf, high=math.inf)
    found = shift([*map(math.log, a)], [*map(math.log, b)], confidence=confidence)
    return Shift(
        middle=math.expm1(found.middle), low=math.expm1(found.low), high=math.expm1(found.high)
    )
