"""The grid of links: who reaches whom, and how fast; and its heat map.

One grid serves hosts and ranks, the terminal and the heat map. If there are too many to show,
adjacent ones are merged, and a cell shows the worst of them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

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

    @property
    def speeds(self) -> list[float]:
        """All speeds, slowest first."""
        known = (cell for row in self.cells for cell in row if cell and not cell.blocked)
        return sorted(cell.bytes_per_s for cell in known if cell.bytes_per_s)


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


# The cividis colour map in equal steps, slow to fast.
_SCALE = ("#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838")
_BLOCKED = "#ffffff"
_CROSS = "#b00020"
_INK = "#1a1a1a"
_LETTER = 6.6  # the width of a letter of 11 px
_LEGEND_WIDTH = 220
_FONT = "font-family:system-ui,sans-serif;font-size:11px"


def heat_map(grid: Grid) -> str:
    """Return the heat map as SVG: rows send, columns receive."""
    count = len(grid.names)
    side = max(18, min(64, 720 // count))
    longest = max(len(_grid_short(name)) for name in grid.names)
    left = round(24 + longest * _LETTER)
    # Column labels are rotated by 45 degrees.
    top = round(58 + longest * _LETTER * 0.71)
    overhang = round(longest * _LETTER * 0.71)
    width = max(left + count * side + overhang + 10, left + _LEGEND_WIDTH + 170)
    height = top + count * side + 78
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(grid.title)}">',
        f"<style>text{{{_FONT};fill:{_INK}}}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" style="font-size:14px;font-weight:600">{escape(_title(grid))}</text>',
        '<text x="12" y="36">rows send, columns receive</text>',
        *_labels(grid, left, top, side),
        *_grid_cells(grid, left, top, side),
        *_legend(grid, left, top + count * side + 24),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _title(grid: Grid) -> str:
    if grid.together == 1:
        return grid.title
    return f"{grid.title}, worst of each {grid.together} x {grid.together} block"


def _grid_short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"


def _labels(grid: Grid, left: int, top: int, side: int) -> Iterator[str]:
    for place, name in enumerate(grid.names):
        middle = place * side + side / 2
        label = escape(_grid_short(name))
        yield f'<text x="{left - 8}" y="{top + middle + 4:g}" text-anchor="end">{label}</text>'
        x, y = left + middle + 3, top - 8
        yield f'<text x="{x:g}" y="{y}" transform="rotate(-45 {x:g} {y})">{label}</text>'


def _grid_cells(grid: Grid, left: int, top: int, side: int) -> Iterator[str]:
    speeds = grid.speeds
    for row, cells in enumerate(grid.cells):
        for column, cell in enumerate(cells):
            x, y = left + column * side, top + row * side
            if cell is not None:
                yield from _heat_cell(cell, x, y, side, speeds)
            elif row != column:
                yield _square(x, y, side, "#eeeeee", "not tried")
                yield _mark(x, y, side, "·", _INK)


def _heat_cell(cell: Cell, x: int, y: int, side: int, speeds: list[float]) -> Iterator[str]:
    tip = f"{cell.source} to {cell.target}: {grid_text(cell)}"
    if cell.round_trip_s is not None:
        tip += f", {cell.round_trip_s * 1e3:.2f} ms round trip"
    if cell.blocked:
        yield _square(x, y, side, _BLOCKED, tip, edge=_CROSS)
        inner = side * 0.28
        for one, other in ((inner, side - inner), (side - inner, inner)):
            yield (
                f'<line x1="{x + inner:g}" y1="{y + one:g}" x2="{x + side - inner:g}" '
                f'y2="{y + other:g}" stroke="{_CROSS}" stroke-width="2.5"/>'
            )
        return
    if cell.problem or cell.bytes_per_s is None:
        yield _square(x, y, side, "#eeeeee", tip)
        yield _mark(x, y, side, "·", _INK)
        return
    share = _grid_share(cell.bytes_per_s, speeds)
    yield _square(x, y, side, _colour(share), tip)
    if side >= 44:
        amount, unit = speed_text(cell.bytes_per_s).split()
        ink = "#ffffff" if share < 0.5 else _INK
        yield _mark(x, y, side, amount, ink, up=5)
        yield _mark(x, y, side, unit, ink, up=-8)


def _square(x: int, y: int, side: int, fill: str, tip: str, edge: str = "#ffffff") -> str:
    return (
        f'<rect x="{x + 1}" y="{y + 1}" width="{side - 2}" height="{side - 2}" rx="2" '
        f'fill="{fill}" stroke="{edge}"><title>{escape(tip)}</title></rect>'
    )


def _mark(x: int, y: int, side: int, text: str, ink: str, up: int = 0) -> str:
    return (
        f'<text x="{x + side / 2:g}" y="{y + side / 2 + 4 - up:g}" text-anchor="middle" '
        f'pointer-events="none" style="fill:{ink}">{escape(text)}</text>'
    )


def _grid_share(value: float, speeds: list[float]) -> float:
    """Return the position of a speed between the slowest and the fastest, on a log scale."""
    low, high = _ends(speeds)
    return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))


def _ends(speeds: list[float]) -> tuple[float, float]:
    """Return the ends of the scale, at least a factor of 10 apart: small differences look small."""
    high = speeds[-1]
    return min(speeds[0], high / 10), high


def _colour(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(_SCALE) - 1)
    first = min(int(place), len(_SCALE) - 2)
    pairs = zip(_channels(_SCALE[first]), _channels(_SCALE[first + 1]), strict=True)
    mixed = (round(one + (other - one) * (place - first)) for one, other in pairs)
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[start : start + 2], 16) for start in (1, 3, 5))


def _legend(grid: Grid, left: int, y: int) -> Iterator[str]:
    if grid.speeds:
        low, high = _ends(grid.speeds)
        step = _LEGEND_WIDTH / 40
        for place in range(40):
            fill = _colour(place / 39)
            yield (
                f'<rect x="{left + place * step:g}" y="{y}" width="{step + 0.5:g}" height="12" '
                f'fill="{fill}"/>'
            )
        yield f'<text x="{left}" y="{y + 26}">{speed_text(low)}</text>'
        end = left + _LEGEND_WIDTH
        yield f'<text x="{end}" y="{y + 26}" text-anchor="end">{speed_text(high)}</text>'
    x = left + _LEGEND_WIDTH + 24
    yield f'<text x="{x}" y="{y + 10}" style="fill:{_CROSS};font-weight:700">✕</text>'
    yield f'<text x="{x + 16}" y="{y + 10}">blocked</text>'
    yield f'<text x="{x + 4}" y="{y + 26}">·</text>'
    yield f'<text x="{x + 16}" y="{y + 26}">not tried</text>'
