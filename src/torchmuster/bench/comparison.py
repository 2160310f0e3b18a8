"""Compare two sets of records of one bench: better, worse, or within noise.

One process is one sample. Its memory layout and core shift all its figures together, so many
samples of one process say little about the next one. With several records on each side, each counts
once, by its median, and the spread between records is the noise. With too few records the spread is
unknown: then all samples are compared, and only a change beyond ``FLOOR`` counts.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.record import BenchRecord, Series
from torchmuster.bench.statistics import Shift, fewest, shift
from torchmuster.errors import Impossible

# Confidence, over all series together, that no unchanged series is reported as changed.
CONFIDENCE = 0.99
# Memory layout alone changes figures by this much: smaller changes are not reported.
LEAST = 0.01
# With single processes their spread is unknown; only larger changes count.
FLOOR = 0.10
_EXACT = ("B", "1")  # counted or computed values can be identical; times cannot

Verdict = Literal["better", "worse", "within noise", "unknown"]


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """One series on both sides. ``change`` 0.03 is 3 % more, whether that is good or bad; the interval is around it."""

    series: Series  # from the first record
    before: float
    after: float
    change: float
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison."""

    changes: tuple[MetricChange, ...]
    left_out: tuple[str, ...]  # titles of series that are not in every record
    by_records: bool  # each record counted once; else their samples, with FLOOR
    records_needed: int  # on each side, to be certain of a change

    @property
    def floor(self) -> float:
        """The smallest change that counts."""
        return LEAST if self.by_records else FLOOR

    def would_be_seen(self, change: MetricChange) -> float:
        """Return how large a change of a series must be to be significant."""
        return max(self.floor, change.high - change.change, change.change - change.low)


def compare_records(a: Sequence[BenchRecord], b: Sequence[BenchRecord]) -> Comparison:
    """Compare the records ``b`` (after) with the records ``a`` (before)."""
    benches = sorted({one.bench for one in (*a, *b)})
    if len(benches) > 1:
        raise Impossible(
            "cannot compare these records",
            why=f"they come from different benches: {', '.join(benches)}",
            fix="pass records of one bench on both sides",
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
            why="no series is in all records: names or labels differ",
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
) -> MetricChange:
    series = before[0]
    a, b = (_comparison_values(side, by_records=by_records) for side in (before, after))
    confidence = 1 - (1 - CONFIDENCE) / compared
    found = _unmistakable(a, b, exact=series.unit in _EXACT)
    if found is None:
        logarithms = ([*map(math.log, side)] for side in (a, b))
        found = shift(*logarithms, confidence=confidence).as_shares()
    verdict: Verdict = "within noise"
    if not math.isfinite(found.high - found.low):
        verdict = "unknown"
    elif (found.low > 0 or found.high < 0) and abs(found.middle) > (LEAST if by_records else FLOOR):
        verdict = "better" if (found.middle > 0) == (series.better == "higher") else "worse"
    return MetricChange(
        series=series,
        before=statistics.median(a),
        after=statistics.median(b),
        change=found.middle,
        low=found.low,
        high=found.high,
        verdict=verdict,
    )


def _comparison_values(side: Sequence[Series], *, by_records: bool) -> list[float]:
    if by_records:
        return [statistics.median(one.samples) for one in side]
    return [sample for one in side for sample in one.samples]


def _unmistakable(a: Sequence[float], b: Sequence[float], *, exact: bool) -> Shift | None:
    """Return the relative change from ``a`` to ``b`` if no test is needed or possible."""
    first, last = statistics.median(a), statistics.median(b)
    if exact and len({*a}) == len({*b}) == 1:
        # Exactly reproducible values need no test.
        share = 0.0 if first == last else (last / first - 1 if first else math.inf)
        return Shift(middle=share, low=share, high=share)
    if min(*a, *b) <= 0:  # no relative change of values that may be 0
        share = last / first - 1 if first else math.nan
        return Shift(middle=share, low=-math.inf, high=math.inf)
    return None
