"""The grid of links: who reaches whom, and how fast.

One grid serves hosts and ranks, the terminal and the page. If there are too many to show,
adjacent ones are merged, and a cell shows the worst of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.diagnose.links.model import Link
from torchmuster.diagnose.result import GroupResult

MOST_SHOWN = 32

# Short labels of the problems of a link.
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
    """One direction of a link; ``problem`` is a key of ``PROBLEMS``, or empty if it works."""

    source: str
    target: str
    problem: str = ""
    bytes_per_s: float | None = None
    round_trip_s: float | None = None

    @property
    def blocked(self) -> bool:
        """Whether data does not pass, or arrives corrupted."""
        return self.problem not in ("", "not-tried")

    @property
    def badness(self) -> tuple[int, float]:
        """The sort key, worst first: blocked, then by speed; unknown last."""
        if self.blocked:
            return 0, 0.0
        if self.bytes_per_s is None:
            return 2, 0.0
        return 1, self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Cells by row and column; ``cells[row][column]`` is the link from the row to the column."""

    title: str
    names: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    worst: tuple[Cell, ...] = ()
    together: int = 1  # how many hosts or ranks a row represents


def grid_of_hosts(result: GroupResult) -> Grid | None:
    """Return the grid of links between hosts; None if there are none."""
    if not result.links:
        return None
    cells = {link.places: _cell(link) for link in result.links}
    names = {machine.place: machine.name for machine in result.machines}
    return _grid("links between hosts", [names[place] for place in sorted(names)], cells)


def grid_of_ranks(result: GroupResult) -> Grid | None:
    """Return the grid of point-to-point speeds; None if not measured, or in separate groups."""
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


def speed_text(bytes_per_s: float) -> str:
    """Format a speed in bits per second: ``9.4 Gbit/s``, ``94 Mbit/s``."""
    bits = bytes_per_s * 8
    for name, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= 0.9995 * size:
            amount = bits / size
            return f"{amount:.1f} {name}" if amount < 9.95 else f"{amount:.0f} {name}"
    return f"{bits:.0f} bit/s"


def grid_text(cell: Cell) -> str:
    """Return the text of a cell: its speed, or its problem."""
    if cell.problem:
        return PROBLEMS.get(cell.problem, cell.problem)
    return "reached" if cell.bytes_per_s is None else speed_text(cell.bytes_per_s)
