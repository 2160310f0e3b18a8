"""The report of a check: terminal text, ``check.json``, ``report.html`` and ``failing-nodes.txt``."""

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.diagnose.links.model import Link
from torchmuster.diagnose.rank_record import RankRecord
from torchmuster.diagnose.result import GroupResult, Machine, failing_hosts
from torchmuster.finding import Status, exit_code, render, worst_first
from torchmuster.pages.columns import aligned_columns
from torchmuster.pages.frame import html_article, html_details, html_page, html_table
from torchmuster.redaction import harmless
from torchmuster.units import format_seconds, plural

# Increased when a key changes its meaning or is removed; new keys may be added at any time.
SCHEMA = 1
_MOST_ROWS = 64  # in a table; all are in check.json
_CLOCK_WORTH_SAYING_S = 0.05
_TITLES = ("host", "ranks", "devices", "cores", "torch", "python", "system", "clock")
_VERDICTS = {
    Status.FAILURE: '<b class="failure">failed</b>',
    Status.WARNING: '<b class="warning">passed, with warnings</b>',
}


def write_check_report(folder: Path, result: GroupResult) -> None:
    """Write check.json, report.html and failing-nodes.txt (one host per line) into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(check_json(result), indent=1, ensure_ascii=False)
    (folder / "check.json").write_text(f"{content}\n", encoding="utf-8")
    (folder / "report.html").write_text(check_page(result), encoding="utf-8")
    failing = "".join(f"{host}\n" for host in failing_hosts(result))
    (folder / "failing-nodes.txt").write_text(failing, encoding="utf-8")


def check_json(result: GroupResult) -> dict[str, Any]:
    """Return the full result of a check as plain JSON types."""
    return {
        "schema": SCHEMA,
        "passed": exit_code(result.findings) == 0,
        "seconds": round(result.seconds, 1),
        "machines": _plain(result.machines),
        "findings": [finding.as_json() for finding in worst_first(result.findings)],
        "not_tried": list(result.not_tried),
        "links": [_link(link) for link in result.links],
        "ranks": _plain(result.ranks),
    }


def _plain(values: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(values))


def _link(link: Link) -> dict[str, Any]:
    figures = link.figures
    return {
        "from": link.source.name,
        "to": link.target.name,
        "address": link.target.address,
        "problem": link.problem,
        "rendezvous_problem": link.rendezvous_problem,
        "bytes_per_s": figures and figures.bytes_per_s,
        "round_trip_s": figures and figures.round_trip_s,
        "stalled": figures is not None and figures.bytes_per_s is None,
        "wrong_bytes": figures.wrong_bytes if figures else 0,
    }


def check_text(result: GroupResult, *, width: int = 100, colour: bool = False) -> str:
    """Return the report that ``muster check`` prints, without the last line."""
    parts = ["\n".join(_machine_lines(result.machines))]
    if result.links:
        parts.append(links_text(result.links))
    if result.not_tried:
        parts.append("\n".join(f"not tried: {test}" for test in result.not_tried))
    shown = []
    for finding in result.findings:
        if finding.status is Status.NOTE:  # report.html has the rest
            finding = dataclasses.replace(finding, why="", fix="", evidence="")
        shown.append(finding)
    if shown:
        parts.append(render(shown, width=width, colour=colour))
    return "\n\n".join(parts)


def _machine_lines(machines: Sequence[Machine]) -> Iterator[str]:
    present = [machine for machine in machines if not machine.missing]
    yield from aligned_columns([_TITLES, *map(_machine_row, present[:_MOST_ROWS])])
    if len(present) > _MOST_ROWS:
        yield f"… and {len(present) - _MOST_ROWS} more; all are in check.json"
    for machine in machines:
        if machine.missing:
            yield harmless(f"{machine.name}  not connected: {machine.missing}")


def _machine_row(machine: Machine) -> tuple[str, ...]:
    return (
        machine.name,
        _or_unknown(machine.ranks),
        devices_text(machine.devices),
        _or_unknown(machine.cores),
        machine.torch or "none",
        _or_unknown(machine.python),
        _or_unknown(machine.system),
        _clock_text(machine.clock_offset_s),
    )


def _or_unknown(value: object) -> str:
    return "?" if value is None else str(value)


def devices_text(devices: Sequence[str]) -> str:
    """Return the devices as text, equal ones counted: ``8 x NVIDIA A100``."""
    parts = []
    for name, count in Counter(devices).items():
        parts.append(name if count == 1 else f"{count} x {name}")
    return ", ".join(parts) or "CPU"


def _clock_text(offset_s: float | None) -> str:
    if offset_s is None:
        return "?"
    return "same" if abs(offset_s) < _CLOCK_WORTH_SAYING_S else f"{offset_s:+.1f} s"


def links_text(links: Sequence[Link]) -> str:
    """Return one line about the links; findings name the bad ones."""
    reached = sum(not link.problem for link in links)
    text = f"links: {reached} of {len(links)} directions connect"
    speeds = []
    for link in links:
        if link.figures is not None and link.figures.bytes_per_s:
            speeds.append(link.figures.bytes_per_s)
    if speeds:
        slowest, median = speed_text(min(speeds)), speed_text(statistics.median(speeds))
        text += f"; {len(speeds)} measured: {slowest} at least, {median} median"
    return text


def speed_text(bytes_per_s: float) -> str:
    """Format a speed in bits per second: ``9.4 Gbit/s``, ``94 Mbit/s``."""
    bits = bytes_per_s * 8
    for name, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= 0.9995 * size:
            amount = bits / size
            return f"{amount:.1f} {name}" if amount < 9.95 else f"{amount:.0f} {name}"
    return f"{bits:.0f} bit/s"


def check_page(result: GroupResult) -> str:
    """Return the report as a self-contained page. All text that hosts sent is escaped."""
    findings = worst_first(result.findings)
    verdict = '<b class="ok">passed</b>'
    if findings:
        verdict = _VERDICTS.get(findings[0].status, verdict)
    hosts, ranks = plural(len(result.machines), "host"), plural(len(result.ranks), "rank")
    parts = [
        f"<h1>muster check: {verdict}</h1>",
        f"<p>{hosts}, {ranks}, in {format_seconds(result.seconds)}</p>",
    ]
    parts += [f"<p>not tried: {escape(test)}</p>" for test in result.not_tried]
    if result.links:
        parts.append(f"<p>{escape(links_text(result.links))}</p>")
    parts += map(html_article, findings)
    rows = [_machine_row(machine) for machine in result.machines if not machine.missing]
    parts.append(html_details("hosts", html_table(_TITLES, rows), opened=True))
    for machine in result.machines:
        if machine.missing:
            parts.append(
                f"<p>{escape(machine.name)} did not connect: {escape(machine.missing)}</p>"
            )
    if result.ranks:
        parts.append(html_details("ranks", _ranks_table(result.ranks), opened=True))
    return html_page("muster check", parts)


def _ranks_table(records: Sequence[RankRecord]) -> str:
    rows = []
    for record in records:
        speeds = []
        for matmul in record.matmuls:
            speeds.append(f"{matmul.flops_per_s / 1e12:.2f} TFLOP/s {matmul.precision}")
        rows.append(
            (
                str(record.rank),
                record.host,
                f"{record.device} {record.device_name}",
                ", ".join(speeds),
                "finished" if record.ended else f"reached stage {record.stage}",
            )
        )
    return html_table(("rank", "host", "device", "matrix products", ""), rows)
