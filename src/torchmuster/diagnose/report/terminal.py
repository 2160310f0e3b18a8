"""The report of a check as terminal text and JSON: hosts, links and findings."""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from torchmuster.diagnose.links.model import Link
from torchmuster.diagnose.report.grid import (
    Grid,
    grid_of_hosts,
    grid_of_ranks,
    grid_text,
    speed_text,
)
from torchmuster.diagnose.result import GroupResult, Machine
from torchmuster.finding import Finding, Status, exit_code, render, worst_first
from torchmuster.redaction import harmless

# Increased when a key changes its meaning or is removed; new keys may be added at any time.
SCHEMA = 1
_MOST_COLUMNS = 8
_WORST_SHOWN = 20
_MOST_MACHINES = 64
_CLOCK_WORTH_SAYING_S = 0.05


def check_json(result: GroupResult) -> dict[str, Any]:
    """Return the full result of a check as plain JSON types."""
    return {
        "schema": SCHEMA,
        "passed": exit_code(result.findings) == 0,
        "seconds": round(result.seconds, 1),
        "machines": [_plain(machine) for machine in result.machines],
        "findings": [finding.as_json() for finding in worst_first(result.findings)],
        "not_tried": list(result.not_tried),
        "links": [_link(link) for link in result.links],
        "ranks": [_plain(rank) for rank in result.ranks],
    }


def json_text(result: GroupResult) -> str:
    """Return the result as JSON text."""
    return json.dumps(check_json(result), indent=1, ensure_ascii=False) + "\n"


def _plain(value: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def _link(link: Link) -> dict[str, Any]:
    figures = link.figures
    return {
        "from": link.source.name,
        "to": link.target.name,
        "address": link.target.address,
        "problem": link.problem,
        "meeting_problem": link.meeting_problem,
        "bytes_per_s": figures and figures.bytes_per_s,
        "round_trip_s": figures and figures.round_trip_s,
        "stalled": bool(figures and figures.stalled),
        "wrong_bytes": figures.wrong_bytes if figures else 0,
    }


def check_text(result: GroupResult, *, width: int = 100, colour: bool = False) -> str:
    """Return the report that ``muster check`` prints, without the last line."""
    parts = ["\n".join(_machines(result.machines))]
    grid = grid_of_hosts(result) or grid_of_ranks(result)
    if grid is not None:
        parts.append("\n".join(_links(grid)))
    if result.not_tried:
        parts.append("\n".join(f"not tried: {one}" for one in result.not_tried))
    if result.findings:
        parts.append(render(map(_in_short, result.findings), width=width, colour=colour))
    return "\n\n".join(parts)


def _in_short(finding: Finding) -> Finding:
    """Shorten a note to its headline; report.html has the rest."""
    if finding.status is not Status.NOTE:
        return finding
    return dataclasses.replace(finding, why="", fix="", evidence="")


def _machines(machines: Sequence[Machine]) -> Iterator[str]:
    shown = [one for one in machines if not one.missing][:_MOST_MACHINES]
    titles = ("host", "ranks", "devices", "cores", "torch", "python", "system", "clock")
    yield from aligned_columns([titles, *(_row(machine) for machine in shown)])
    left_out = sum(not one.missing for one in machines) - len(shown)
    if left_out:
        yield f"… and {left_out} more; all are in check.json"
    for machine in machines:
        if machine.missing:
            yield harmless(f"{machine.name}  not connected: {machine.missing}")


def _row(machine: Machine) -> tuple[str, ...]:
    return (
        machine.name,
        or_unknown(machine.ranks),
        _devices(machine.devices),
        or_unknown(machine.cores),
        machine.torch or "none",
        or_unknown(machine.python),
        or_unknown(machine.system),
        clock_text(machine.clock_offset_s),
    )


def or_unknown(value: object) -> str:
    """Return a value as text; "?" if it is unknown."""
    return "?" if value is None else str(value)


def _devices(devices: Sequence[str]) -> str:
    """Return the devices as text, equal ones counted: ``8 x NVIDIA A100``."""
    counts = {name: devices.count(name) for name in dict.fromkeys(devices)}
    parts = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    return ", ".join(parts) or "CPU"


def clock_text(offset_s: float | None) -> str:
    """Return the clock offset as text; "same" if it is too small to measure."""
    if offset_s is None:
        return "?"
    return "same" if abs(offset_s) < _CLOCK_WORTH_SAYING_S else f"{offset_s:+.1f} s"


def _links(grid: Grid) -> Iterator[str]:
    if len(grid.names) <= _MOST_COLUMNS:
        yield f"{grid.title}, from row to column"
        header = ("", *grid.names)
        yield from aligned_columns([header, *_rows(grid)], right=True)
        return
    speeds = [cell.bytes_per_s for cell in grid.worst if cell.bytes_per_s]
    yield f"{grid.title}: {len(grid.worst)} measured" + (
        f", median {speed_text(statistics.median(speeds))}" if speeds else ""
    )
    yield from aligned_columns(
        [
            (f"  {cell.source} to {cell.target}", grid_text(cell))
            for cell in grid.worst[:_WORST_SHOWN]
        ]
    )
    if len(grid.worst) > _WORST_SHOWN:
        yield f"  … and {len(grid.worst) - _WORST_SHOWN} more, none of them worse"


def _rows(grid: Grid) -> Iterator[tuple[str, ...]]:
    for place, (name, row) in enumerate(zip(grid.names, grid.cells, strict=True)):
        cells = ("-" if column == place else "not tried" for column in range(len(row)))
        yield (
            name,
            *(grid_text(cell) if cell else other for cell, other in zip(row, cells, strict=True)),
        )


def aligned_columns(rows: Sequence[Sequence[str]], *, right: bool = False) -> Iterator[str]:
    """Align cells in columns; ``right`` aligns all but the first column to the right."""
    rows = [[harmless(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if right and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
