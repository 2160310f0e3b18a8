"""``muster bench compare``: two records of one bench, case by case."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.bench.result import Record, Row, quartiles
from torchmuster.bench.show import case_text
from torchmuster.errors import Impossible
from torchmuster.pages.charts import amount_text

SAME = 0.02  # two processes of one program differ by up to this, even if the quartiles are apart


@dataclass(frozen=True, kw_only=True)
class Change:
    """A case in both records: medians and interquartile ranges, after / before, and the verdict."""

    case: str
    before_s: float
    before_iqr_s: float
    after_s: float
    after_iqr_s: float
    ratio: float  # of the medians: more than 1 is slower
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        times = (self.before_s, self.before_iqr_s, self.after_s, self.after_iqr_s)
        texts = [amount_text(seconds, "s") for seconds in times]
        return self.case, *texts, f"{self.ratio:.3f}", self.verdict


def compare_records(before: Record, after: Record) -> list[Change]:
    """Return the changes of all timed cases that both records have, in the order of ``before``.

    Raises Impossible for records of different benches, or without a case in common.
    """
    rows_after = {case_text(row): row for row in after.rows if row.seconds}
    changes = []
    for row in before.rows:
        if row.seconds and case_text(row) in rows_after:
            changes.append(compare_rows(row, rows_after[case_text(row)]))
    if before.bench != after.bench or not changes:
        raise Impossible(
            f"cannot compare this record of {before.bench} with this one of {after.bench}",
            why="they have no case in common",
            fix="give two records of the same bench, measured with the same flags",
        )
    return changes


def compare_rows(before: Row, after: Row) -> Change:
    """Compare two rows: ``slower`` or ``faster`` if the quartile ranges do not overlap."""
    before_low_s, before_s, before_high_s = quartiles(before.seconds)
    after_low_s, after_s, after_high_s = quartiles(after.seconds)
    verdict = "within noise"
    if after_s > before_s * (1 + SAME) and after_low_s > before_high_s:
        verdict = "slower"
    if after_s < before_s * (1 - SAME) and after_high_s < before_low_s:
        verdict = "faster"
    return Change(
        case=case_text(before),
        before_s=before_s,
        before_iqr_s=before_high_s - before_low_s,
        after_s=after_s,
        after_iqr_s=after_high_s - after_low_s,
        ratio=after_s / before_s,
        verdict=verdict,
    )


def host_differences(before: Record, after: Record) -> list[str]:
    """Return what differs between the hosts and settings of two records."""
    lines = []
    for name, value in {**before.host, **before.settings}.items():
        other = {**after.host, **after.settings}.get(name)
        if value != other:
            lines.append(f"different {name}: {value} and {other}")
    return lines


def conclusion(changes: Sequence[Change]) -> str:
    """Return the number of slower and faster cases, and the largest change, in one sentence."""
    counts = Counter(change.verdict for change in changes)
    numbers = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    largest = max(changes, key=lambda change: abs(change.ratio - 1))
    return (
        f"{numbers} of {len(changes)} cases; the largest change is {largest.ratio - 1:+.1%} "
        f"({largest.case}, {largest.verdict})."
    )
