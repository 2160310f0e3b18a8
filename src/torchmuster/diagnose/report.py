"""The report of a check: terminal text, ``check.json`` and ``failing-nodes.txt``."""

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.diagnose.links.model import Link
from torchmuster.diagnose.result import GroupResult, Machine, failing_hosts
from torchmuster.finding import exit_code, render
from torchmuster.pages.columns import aligned_columns
from torchmuster.redaction import harmless

# Increased when a key changes its meaning or is removed; new keys may be added at any time.
SCHEMA = 1
_MOST_ROWS = 64  # in a table; all are in check.json
_CLOCK_WORTH_SAYING_S = 0.05
_TITLES = ("host", "ranks", "devices", "cores", "torch", "python", "system", "clock")


def write_check_report(folder: Path, result: GroupResult) -> None:
    """Write check.json and failing-nodes.txt (one host per line) into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(check_json(result), indent=1, ensure_ascii=False)
    (folder / "check.json").write_text(f"{content}\n", encoding="utf-8")
    failing = "".join(f"{host}\n" for host in failing_hosts(result.findings))
    (folder / "failing-nodes.txt").write_text(failing, encoding="utf-8")


def check_json(result: GroupResult) -> dict[str, Any]:
    """Return the full result of a check as plain JSON types."""
    passed = exit_code(result.findings) == 0
    content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(result))
    return {"schema": SCHEMA, "passed": passed, **content}


def check_text(result: GroupResult, *, width: int = 100, colour: bool = False) -> str:
    """Return the report that ``muster check`` prints, without the last line."""
    parts = ["\n".join(_machine_lines(result.machines))]
    if result.links:
        parts.append(links_text(result.links))
    if result.not_tried:
        parts.append("\n".join(f"not tried: {test}" for test in result.not_tried))
    if result.findings:
        parts.append(render(result.findings, width=width, colour=colour))
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
    record = machine.record
    assert record is not None  # it has connected
    clock = "same"
    if abs(machine.clock_offset_s or 0.0) >= _CLOCK_WORTH_SAYING_S:
        clock = f"{machine.clock_offset_s:+.1f} s"
    return (
        machine.name,
        "?" if machine.ranks is None else str(machine.ranks),
        devices_text(machine.devices),
        str(record.cores),
        record.torch or "none",
        record.python,
        record.system,
        clock,
    )


def devices_text(devices: Sequence[str]) -> str:
    """Return the devices as text, equal ones counted: ``8 x NVIDIA A100``."""
    parts = []
    for name, count in Counter(devices).items():
        parts.append(name if count == 1 else f"{count} x {name}")
    return ", ".join(parts) or "CPU"


def links_text(links: Sequence[Link]) -> str:
    """Return one line about the links; findings name the bad ones."""
    reached = sum(not link.problem for link in links)
    text = f"links: {reached} of {len(links)} directions connect"
    speeds = []
    for link in links:
        if link.speed is not None and link.speed.bytes_per_s:
            speeds.append(link.speed.bytes_per_s * 8 / 1e9)
    if speeds:
        slowest, median = min(speeds), statistics.median(speeds)
        text += f"; slowest {slowest:.3g} Gbit/s, median {median:.3g} Gbit/s"
    return text
