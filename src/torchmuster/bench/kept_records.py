"""Which records are meant by a path: one, or all that lie side by side in a folder."""

from collections.abc import Sequence
from pathlib import Path

from torchmuster.bench.record import FILE, BenchRecord, read
from torchmuster.errors import Impossible


def records_at(path: Path) -> list[BenchRecord]:
    """Return the record of a file or of a bench's folder, or those of all benches' folders inside a folder."""
    if path.is_file() or not path.exists():
        return [read(path)]
    if (path / FILE).is_file():
        return [read(path / FILE)]
    found = sorted(path.glob(f"*/{FILE}"))
    if not found:
        raise Impossible(
            f"there is no record in {path}",
            why=f"neither it nor a folder in it has a {FILE}",
            fix=f"measure into it: muster bench NAME --out {path}/1",
        )
    return sorted(map(read, found), key=lambda one: one.date)


def take_turns(a: Sequence[BenchRecord], b: Sequence[BenchRecord]) -> bool:
    """Say whether two sides were measured in turns, so that a machine's drift is not taken for a change."""
    return not (
        max(one.date for one in a) <= min(one.date for one in b)
        or max(one.date for one in b) <= min(one.date for one in a)
    )
