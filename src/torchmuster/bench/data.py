"""``muster bench data``: samples per second by number of loader workers.

``torchmuster.worker.reading`` measures, since building the data of settings belongs to training. A row
has the time of one batch, and the samples of all ranks in it.
"""

from collections.abc import Sequence
from typing import Any

from torchmuster.bench import show
from torchmuster.bench.result import Report, Row, doublings
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.pages.charts import Bar, bar_chart

MEASURING = "torchmuster.worker.reading"
ENOUGH = 0.95  # of the best rate: fewer workers that reach it are preferred


def settings(device: str, *, quick: bool, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of the measurement but the settings of the data: 0, 1, 2, 4, … workers."""
    cores = usable_cores().value // max(ranks)
    return {"workers": (0, *doublings(max(2, cores))), "seconds": 0.3 if quick else 2.0}


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
    table = show.table(
        "Reading with loader workers (per rank)",
        rows,
        show.label("workers"),
        show.TIME,
        ("samples/s", lambda row: f"{rate(row):,.0f}"),
    )
    bars = [Bar(name=f"{row.labels['workers']} workers", parts={"": rate(row)}) for row in rows]
    chart = bar_chart("Reading data: samples per second, all ranks", "samples/s", bars)
    return Report(
        conclusion=conclusion,
        advice=f"set data.workers: {workers}; more workers add less than {1 - ENOUGH:.0%}.",
        tables=[table],
        charts={"data": chart},
    )
