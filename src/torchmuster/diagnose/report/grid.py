"""The picture's contents without its looks: who reaches whom, and how fast.

One grid serves machines and ranks, the terminal and the picture. Where there are too many to show each
of them, neighbours are put together, and a cell shows the worst of what it stands for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.diagnose.links.model import Link
from torchmuster.diagnose.result import GroupResult

MOST_SHOWN = 32

# What each problem of a link is called where there is little room.
PROBLEMS = {
    "timeout": "no answer",
    "refused": "refused",
    "prohibited": "prohibited",
    "absent": "absent",
    "no-route": "no route",
    "impostor": "other host",
    "no-name": "no name",
    "unreachable": "unreachable",
    "stalled": "stalls",
    "wrong": "wrong data",
    "not-tried": "not tried",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One direction between two; ``problem`` is a key of ``PROBLEMS``, or empty if it works."""

    source: str
    target: str
    problem: str = ""
    bytes_per_s: float | None = None
    round_trip_s: float | None = None

    @property
    def blocked(self) -> bool:
        """Whether data does not pass, or not rightly."""
        return self.problem not in ("", "not-tried")

    @property
    def badness(self) -> tuple[int, float]:
        """The worst sorts first: blocked, then by speed; what is not known comes last."""
        if self.blocked:
            return 0, 0.0
        if self.bytes_per_s is None:
            return 2, 0.0
        return 1, self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Cells by row and column; ``cells[row][column]`` is from the row's to the column's."""

    title: str
    names: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    worst: tuple[Cell, ...] = ()
    together: int = 1  # how many neighbours a row stands for

    @property
    def speeds(self) -> list[float]:
        """All speeds in it, slowest first."""
        known = (cell for row in self.cells for cell in row if cell and not cell.blocked)
        return sorted(cell.bytes_per_s for cell in known if cell.bytes_per_s)


def of_machines(result: GroupResult) -> Grid | None:
    """Return the links between machines; None if there are none."""
    if not result.links:
        return None
    cells = {link.places: _cell(link) for link in result.links}
    names = {machine.place: machine.name for machine in result.machines}
    return _grid("links between machines", [names[place] for place in sorted(names)], cells)


def of_ranks(result: GroupResult) -> Grid | None:
    """Return what ranks sent each other two by two; None if they did not, or in separate groups."""
    ranks = sorted(result.ranks, key=lambda record: record.rank)
    numbers = [record.rank for record in ranks]
    if numbers != list(range(len(numbers))) or not any(record.pairs for record in ranks):
        return None
    names = [f"{record.rank} {record.host}" for record in ranks]
    cells = {
        (pair.peer, record.rank): Cell(
            source=f"rank {pair.peer}",
            target=f"rank {record.rank}",
            problem="wrong" if pair.values.wrong else "",
            bytes_per_s=pair.bytes_per_s,
            round_trip_s=pair.latency_s and 2 * pair.latency_s,
        )
        for record in ranks
        for pair in record.pairs
    }
    return _grid("data between ranks", names, cells)


def _cell(link: Link) -> Cell:
    figures = link.figures
    problem = link.problem or link.meeting_problem or ""
    if not problem and figures:
        problem = "stalled" if figures.stalled else "wrong" if figures.wrong_bytes else ""
    return Cell(
        source=link.source.name,
        target=link.target.name,
        problem=problem,
        bytes_per_s=None if figures is None else figures.bytes_per_s,
        round_trip_s=None if figures is None else figures.round_trip_s,
    )


def _grid(title: str, names: Sequence[str], cells: dict[tuple[int, int], Cell]) -> Grid:
    together = math.ceil(len(names) / MOST_SHOWN)
    worst_of: dict[tuple[int, int], Cell] = {}
    for (source, target), cell in cells.items():
        key = source // together, target // together
        if key not in worst_of or cell.badness < worst_of[key].badness:
            worst_of[key] = cell
    blocks = [names[first : first + together] for first in range(0, len(names), together)]
    labels = [block[0] if len(block) == 1 else f"{block[0]} … {block[-1]}" for block in blocks]
    size = range(len(labels))
    return Grid(
        title=title,
        names=tuple(labels),
        cells=tuple(tuple(worst_of.get((row, column)) for column in size) for row in size),
        worst=tuple(sorted(cells.values(), key=lambda cell: cell.badness)),
        together=together,
    )


def speed(bytes_per_s: float) -> str:
    """Format a speed as networks are sold: ``9.4 Gbit/s``, ``94 Mbit/s``."""
    bits = bytes_per_s * 8
    for name, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= 0.9995 * size:
            amount = bits / size
            return f"{amount:.1f} {name}" if amount < 9.95 else f"{amount:.0f} {name}"
    return f"{bits:.0f} bit/s"


def words(cell: Cell) -> str:
    """Say in a few words what a cell has: its speed, or why there is none."""
    if cell.problem:
        return PROBLEMS.get(cell.problem, cell.problem)
    return "reached" if cell.bytes_per_s is None else speed(cell.bytes_per_s)
