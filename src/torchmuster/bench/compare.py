"""``muster bench compare``: two records of one bench, case by case."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.bench.result import Record, quartiles
from torchmuster.bench.show import case_text
from torchmuster.errors import Impossible
from torchmuster.pages.charts import amount_text

SAME = 0.02  # two processes of one program differ by up to this, even if the quartiles are apart


@dataclass(frozen=True, kw_only=True)
class Change:
    """A case in both records: quartiles in seconds, and after / before of the medians."""

    case: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]

    @property
    def ratio(self) -> float:
        """The median after / the median before; more than 1 is slower."""
        return self.after[1] / self.before[1]

    @property
    def verdict(self) -> str:
        """``slower`` or ``faster`` if the quartile ranges do not overlap; else ``within noise``."""
        if self.ratio > 1 + SAME and self.after[0] > self.before[2]:
            return "slower"
        if self.ratio < 1 - SAME and self.after[2] < self.before[0]:
            return "faster"
        return "within noise"


def compare_records(before: Record, after: Record) -> list[Change]:
    """Return the changes of all timed cases that both records have, in the order of ``before``.

    Raises Impossible for records of different benches, or without a case in common.
    """
    if before.bench != after.bench:
        raise Impossible(
            f"cannot compare a record of {before.bench} with one of {after.bench}",
            why="the two benches measure different things",
            fix="give two records of the same bench",
        )
    rows_after = {case_text(row): row for row in after.rows if row.seconds}
    changes = []
    for row in before.rows:
        if row.seconds and case_text(row) in rows_after:
            case = case_text(row)
            after_s = rows_after[case].seconds
            changes.append(
                Change(case=case, before=quartiles(row.seconds), after=quartiles(after_s))
            )
    if not changes:
        raise Impossible(
            f"the two records of {before.bench} have no case in common",
            why="they were measured with different settings",
            fix="measure both with the same flags",
        )
    return changes


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


def cells(change: Change) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        change.case,
        amount_text(change.before[1], "s"),
        amount_text(change.before[2] - change.before[0], "s"),
        amount_text(change.after[1], "s"),
        amount_text(change.after[2] - change.after[0], "s"),
        f"{change.ratio:.3f}",
        change.verdict,
    )
