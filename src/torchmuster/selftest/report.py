"""The table at the end of a self-test."""

import textwrap
from collections import Counter
from collections.abc import Iterator

from torchmuster.selftest.record import SelftestRecord

_NARROW = 60
_MOST_LINES = 4  # of the error of a broken check


def result_table(record: SelftestRecord, *, width: int) -> str:
    """Return the results as text: one check per line or two, and a summary."""
    return "\n".join(_lines(record, max(width, _NARROW)))


def _lines(record: SelftestRecord, width: int) -> Iterator[str]:
    longest = max((len(one.id) for one in record.checks), default=0)
    lead = longest + 21
    yield f"{'check':<{longest}}  {'result':<9}  {'time':>6}"
    for one in record.checks:
        seconds = f"{one.seconds:.0f} s" if one.seconds else ""
        shown = one.says.splitlines()[:_MOST_LINES]
        says = [
            part
            for line in shown
            for part in textwrap.wrap(line, width - lead, break_on_hyphens=False)
        ]
        yield f"{one.id:<{longest}}  {one.verdict:<9}  {seconds:>6}  {says[0] if says else ''}"
        for more in says[1:]:
            yield f"{'':<{longest}}  {'':<9}  {'':>6}  {more}"
    yield ""
    yield _summary(record)


def _summary(record: SelftestRecord) -> str:
    counts = Counter(one.verdict for one in record.checks)
    parts = [f"{count} {verdict}" for verdict, count in counts.items()]
    where = ", ".join(record.hardware.get("gpus", [])) or str(record.hardware.get("cpu", "CPU"))
    versions = f"torch {record.versions.get('torch', '?')}"
    text = f"{', '.join(parts)} in {record.minutes:g} min on {where}, {versions}"
    if record.planted:
        text += "; with planted faults, every check that ran must be refuted"
    return text
