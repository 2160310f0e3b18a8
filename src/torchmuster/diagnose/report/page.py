"""The report of a check as a self-contained page: report.html."""

from collections.abc import Iterator, Sequence
from html import escape

from torchmuster.diagnose.rank_record import RankRecord
from torchmuster.diagnose.report.grid import Grid, grid_of_hosts, grid_of_ranks, grid_text
from torchmuster.diagnose.report.terminal import clock_text, or_unknown
from torchmuster.diagnose.result import GroupResult, Machine
from torchmuster.finding import Status, worst_first
from torchmuster.pages import frame
from torchmuster.pages.frame import html_article, html_details, html_table
from torchmuster.units import format_seconds, plural

_WORST_SHOWN = 20
_MOST_ROWS = 1000  # all are in check.json
_OPEN_UP_TO = 40


def check_page(result: GroupResult) -> str:
    """Return the page. All text that hosts sent is escaped."""
    found = worst_first(result.findings)
    parts = [
        f"<h1>{_verdict(result)}</h1>",
        f"<p>{plural(len(result.machines), 'host')}, {plural(len(result.ranks), 'rank')}, "
        f"in {format_seconds(result.seconds)}</p>",
        *(f"<p>not tried: {escape(one)}</p>" for one in result.not_tried),
        *(html_article(one) for one in found if one.status is not Status.NOTE),
    ]
    for grid in (grid_of_hosts(result), grid_of_ranks(result)):
        if grid is not None:
            parts += _links(grid)
    parts.append(_section("hosts", _machines(result.machines), len(result.machines)))
    if result.ranks:
        parts.append(_section("ranks", _ranks(result.ranks), len(result.ranks)))
    parts += [html_article(one) for one in found if one.status is Status.NOTE]
    return frame.html_page("muster check", parts)


def _verdict(result: GroupResult) -> str:
    for status, word in ((Status.FAILURE, "failed"), (Status.WARNING, "passed, with warnings")):
        if any(finding.status is status for finding in result.findings):
            return f'muster check: <b class="{status.value}">{word}</b>'
    return 'muster check: <b class="ok">passed</b>'


def _section(title: str, body: str, rows: int) -> str:
    """Return a section of the page; a long one is collapsed."""
    return html_details(title, body, opened=rows <= _OPEN_UP_TO)


def _machines(machines: Sequence[Machine]) -> str:
    titles = ("host", "ranks", "devices", "cores", "torch", "python", "system", "clock")
    return html_table(titles, (_machine(machine) for machine in machines[:_MOST_ROWS]))


def _machine(machine: Machine) -> tuple[str, ...]:
    if machine.missing:
        return machine.name, "", f"not connected: {machine.missing}", "", "", "", "", ""
    return (
        machine.name,
        or_unknown(machine.ranks),
        ", ".join(machine.devices) or "CPU",
        or_unknown(machine.cores),
        machine.torch or "none",
        or_unknown(machine.python),
        or_unknown(machine.system),
        clock_text(machine.clock_offset_s),
    )


def _links(grid: Grid) -> Iterator[str]:
    yield f"<h2>{escape(grid.title)}, from row to column</h2>"
    rows = []
    for name, row in zip(grid.names, grid.cells, strict=True):
        rows.append((name, *("" if cell is None else grid_text(cell) for cell in row)))
    yield html_table(("", *grid.names), rows)
    if grid.together == 1:
        return
    worst = []
    for cell in grid.worst[:_WORST_SHOWN]:
        worst.append((f"{cell.source} to {cell.target}", grid_text(cell)))
    yield html_table(("worst links", ""), worst)


def _ranks(records: Sequence[RankRecord]) -> str:
    rows = []
    for record in records[:_MOST_ROWS]:
        sums = next((one for one in record.operations if one.name == "all-reduce"), None)
        bus = "?"
        if sums and sums.large_s:
            moved = 2 * (record.world_size - 1) / record.world_size * sums.large_bytes
            bus = f"{moved / sums.large_s / 1e9:.2f} GB/s"
        rows.append(
            (
                str(record.rank),
                record.host,
                f"{record.device} {record.device_name}",
                ", ".join(
                    f"{one.flops_per_s / 1e12:.2f} TFLOP/s {one.precision}"
                    for one in record.matmuls
                ),
                bus,
                "finished" if record.ended else f"reached stage {record.stage}",
            )
        )
    return html_table(("rank", "host", "device", "matrix products", "all-reduce (bus)", ""), rows)
