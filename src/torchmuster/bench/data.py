"""``muster bench data``: samples per second by number of loader workers.

``torchmuster.worker.reading`` measures, since building the data of settings belongs to training. A row
has the time of one batch, and the samples of all ranks in it.
"""

from collections.abc import Sequence

from torchmuster.bench.result import Report, Row, Table
from torchmuster.pages.charts import Bar, amount_text, bar_chart

ENOUGH = 0.95  # of the best rate: fewer workers that reach it are preferred


def rate(row: Row) -> float:
    """Return the samples per second of all ranks together."""
    return row.figures["samples"] / row.median_s


def summarize(rows: Sequence[Row]) -> Report:
    """Recommend the smallest number of workers with nearly the best rate."""
    best = max(rows, key=rate)
    enough = next(row for row in rows if rate(row) >= ENOUGH * rate(best))
    workers = int(enough.labels["workers"])
    in_rank = rows[0]
    conclusion = (
        f"{workers} workers per rank read {rate(enough):,.0f} samples/s, "
        f"{rate(enough) / rate(in_rank):.2g} times as many as {in_rank.labels['workers']} workers."
    )
    return Report(
        conclusion=conclusion,
        advice=f"set data.workers: {workers}; more workers add less than {1 - ENOUGH:.0%}.",
        tables=[
            Table(
                title="Reading with loader workers (per rank)",
                head=("workers", "batch", "samples/s"),
                rows=[table_cells(row) for row in rows],
            )
        ],
        charts={"data": chart(rows)},
    )


def table_cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        str(row.labels["workers"]),
        amount_text(row.median_s, "s"),
        f"{rate(row):,.0f}",
    )


def chart(rows: Sequence[Row]) -> str:
    """Draw the rate, a bar for each number of workers."""
    bars = []
    for row in rows:
        bars.append(Bar(name=f"{row.labels['workers']} workers", parts={"": rate(row)}))
    return bar_chart("Reading data: samples per second, all ranks", "samples/s", bars)
