"""The table of ``muster gpus``, in colour."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchmuster.cli import output
from torchmuster.devices import choose
from torchmuster.devices.model import Device, DeviceProcess, Node
from torchmuster.devices.processes import age_s
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.request import WORTH_MENTIONING_IDLE_S, Claim, in_use_by
from torchmuster.devices.visibility import Visible
from torchmuster.finding import render
from torchmuster.redaction import harmless
from torchmuster.units import GiB, format_bytes, format_seconds, plural

Update = Callable[[Node, Visible, Mapping[str, Claim]], None]
# Without a terminal there is no width limit; this fits the whole table.
_PIPE_WIDTH = 160


def show(
    node: Node,
    shown: Visible,
    claims: Mapping[str, Claim],
    *,
    links: bool,
    uuids: bool,
    notes: Sequence[str] = (),
) -> None:
    """Print the table once, and notes below it."""
    console = _console()
    width = console.width
    console.print(screen(node, shown, claims, links=links, uuids=uuids, width=width, notes=notes))


@contextmanager
def live(*, links: bool, uuids: bool) -> Iterator[Update]:
    """Show a table that is redrawn in place; without a terminal, print one below the other."""
    console = _console()

    def draw(node: Node, shown: Visible, claims: Mapping[str, Claim]) -> RenderableType:
        width = console.width
        return screen(
            node, shown, claims, links=links, uuids=uuids, width=width, findings_first=True
        )

    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda node, shown, claims: console.print(draw(node, shown, claims), "")
        return
    with Live(console=console, auto_refresh=False, screen=True) as view:
        yield lambda node, shown, claims: view.update(draw(node, shown, claims), refresh=True)


def _console() -> Console:
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(
        highlight=False,
        no_color=bool(os.environ.get("NO_COLOR")),
        width=_PIPE_WIDTH if piped else None,
    )


def screen(
    node: Node,
    shown: Visible,
    claims: Mapping[str, Claim],
    *,
    links: bool,
    uuids: bool,
    width: int,
    findings_first: bool = False,
    notes: Sequence[str] = (),
) -> RenderableType:
    """Return everything that ``muster gpus`` shows, to be printed by rich."""
    parts: list[RenderableType] = []
    if node.accelerators:
        parts += [Text(), _cli_table(node, shown, claims, uuids, width)]
        if links:
            parts += [Text(), _link_matrix(node)]
        parts += [
            Text(),
            _hint(node, shown, claims),
            *(Text(harmless(note), "dim") for note in notes),
        ]
    else:
        parts.append(_without_gpus(node))
    findings = [*node.findings, *shown.findings]
    if findings:
        colour = output.wants_colour(sys.stdout)
        text = Text.from_ansi(render(findings, width=width, colour=colour))
        # It is wrapped already, and commands must stay on one line for copying.
        text.no_wrap, text.overflow = True, "ignore"
        parts = [Text(), text, *parts] if findings_first else [*parts, Text(), text]
    return Group(_headline(node, shown, claims), *parts)


def _headline(node: Node, shown: Visible, claims: Mapping[str, Claim]) -> Text:
    text = Text(node.hostname, style="bold")
    facts = []
    if node.accelerators:
        free = len(_free(shown, claims))
        usable = [
            one for one in node.accelerators if one.mig_index is not None or not one.mig_enabled
        ]
        facts.append(f"{plural(len(usable), 'GPU')}, {free} free")
    if node.driver_version:
        facts.append(f"driver {node.driver_version}")
    if node.cuda_version:
        facts.append(f"CUDA up to {node.cuda_version}")
    return text.append("".join(f"  ·  {fact}" for fact in facts), style="not bold")


def _free(shown: Visible, claims: Mapping[str, Claim]) -> list[Device]:
    return [
        one
        for one in shown.devices
        if one.uuid not in claims and not one.trouble and not in_use_by(one)
    ]


@dataclass(frozen=True)
class _Column:
    title: str
    justify: Literal["left", "right"]
    cell: Callable[[Device], Text]


def _columns(uuids: bool, width: int) -> Iterator[_Column]:
    """Yield the columns; narrow terminals get fewer, but always the users."""
    roomy, wide = width >= 70, width >= 90
    yield _Column("GPU", "right", lambda one: Text(one.number, style="bold"))
    yield _Column("name", "left", lambda one: Text(_short_name(one)))
    if roomy:
        yield _Column("memory", "left", _bar)
    yield _Column("" if roomy else "memory", "right", lambda one: Text(_gpus_table_memory(one)))
    if roomy:
        yield _Column("busy", "right", lambda one: _gpus_table_percent(one.utilization_percent))
    if wide:
        yield _Column("temp", "right", _temperature)
        yield _Column("power", "right", lambda one: Text(_power(one)))
    if uuids:
        yield _Column("uuid", "left", lambda one: Text(one.uuid, overflow="fold"))


def _cli_table(
    node: Node, shown: Visible, claims: Mapping[str, Claim], uuids: bool, width: int
) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False, expand=True)
    columns = list(_columns(uuids, width))
    for column in columns:
        table.add_column(column.title, justify=column.justify, no_wrap=True)
    table.add_column("used by", no_wrap=True, overflow="ellipsis", ratio=1, min_width=12)
    for device in node.accelerators:
        table.add_row(
            *(column.cell(device) for column in columns),
            _used_by(device, shown, claims.get(device.uuid), node.taken_unix_s),
            style="dim" if device.uuid in shown.hidden_by else "",
        )
    return table


def _short_name(device: Device) -> str:
    """Return the name without the vendor's prefix; for a MIG slice, its profile."""
    name = device.name.removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("AMD ")
    return f"└ {name.rpartition(' ')[2]}" if device.mig_index is not None else name


def _bar(device: Device, length: int = 10) -> Text:
    if not device.total_bytes or device.used_bytes is None:
        return Text(" " * length)
    share = device.used_bytes / device.total_bytes
    filled = round(share * length) or (1 if share > 0.02 else 0)
    style = "red" if share > 0.9 else "yellow" if share > 0.5 else "green"
    bar = Text("━" * filled, style=style)
    return bar.append("─" * (length - filled), style="bright_black")


def _gpus_table_memory(device: Device) -> str:
    if device.total_bytes is None:
        return "-"
    total = f"{device.total_bytes / GiB:.0f} GiB"
    return total if device.used_bytes is None else f"{device.used_bytes / GiB:.1f} / {total}"


def _gpus_table_percent(value: int | None) -> Text:
    if value is None:
        return Text("-", style="dim")
    return Text(f"{value} %", style="bold" if value >= 50 else "dim" if value == 0 else "")


def _temperature(device: Device) -> Text:
    if device.temperature_c is None:
        return Text("-", style="dim")
    limit = device.slowdown_temperature_c or 90
    hot = device.temperature_c >= limit - 5
    return Text(f"{device.temperature_c} °C", style="bold red" if hot else "")


def _power(device: Device) -> str:
    if device.power_w is None:
        return "-"
    limit = f" / {device.power_limit_w:.0f}" if device.power_limit_w else ""
    return f"{device.power_w:.0f}{limit} W"


def _used_by(device: Device, shown: Visible, claim: Claim | None, now: float) -> Text:
    if device.trouble:
        return Text(f"does not answer: {device.trouble}", style="bold red")
    if claim is not None:
        held = f"claimed {format_seconds(max(now - claim.since_unix_s, 0))}"
        return _gpus_table_line([(claim.user, "cyan"), (held, ""), (claim.command, "dim")])
    if device.mig_enabled and device.mig_index is None:
        return Text("split into MIG slices", style="dim")
    if device.compute_processes:
        return _gpus_table_processes(device.compute_processes, now)
    if hidden_by := shown.hidden_by.get(device.uuid):
        return Text(f"hidden by {hidden_by.partition('=')[0]}")
    if user := in_use_by(device):
        return Text(user, style="yellow")
    return Text("free", style="green")


def _gpus_table_processes(processes: tuple[DeviceProcess, ...], now: float) -> Text:
    """Return the process with the most memory, and the number of others."""
    main = max(processes, key=lambda one: one.memory_bytes or 0)
    age = age_s(main, now)
    parts = [(main.user or f"pid {main.pid}", "cyan")]
    if main.idle_s is not None and main.idle_s >= WORTH_MENTIONING_IDLE_S:
        parts.append((f"idle {format_seconds(main.idle_s)}", "yellow"))
    elif age is not None:
        parts.append((format_seconds(age), ""))
    if len(processes) > 1:
        parts.append((f"+{len(processes) - 1} more", ""))
    parts.append((main.command or "", "dim"))
    return _gpus_table_line(parts)


def _gpus_table_line(parts: list[tuple[str, str]]) -> Text:
    return Text("  ").join(Text(text, style=style) for text, style in parts if text)


def _link_matrix(node: Node) -> Table:
    """Return the link between each pair of GPUs, with nvidia-smi's abbreviations."""
    devices = [one for one in node.accelerators if one.mig_index is None]
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    table.add_column("links", justify="right")
    for device in devices:
        table.add_column(device.number, justify="center")
    for a in devices:
        cells = [_link(node, a, b) for b in devices]
        table.add_row(Text(a.number, style="bold"), *cells)
    return table


def _link(node: Node, a: Device, b: Device) -> Text:
    link = node.link(a, b)
    if link is None:
        return Text("·", style="dim")
    return Text(link.short, style="green" if link.lanes else "dim")


def _hint(node: Node, shown: Visible, claims: Mapping[str, Claim]) -> Text:
    free = _free(shown, claims)
    if not shown.devices:
        hidden = ", ".join(sorted(set(shown.hidden_by.values())))
        return Text(f"all GPUs are hidden by {hidden}", "dim")
    if not free:
        return Text("none free; to wait: muster gpus pick --wait -- python train.py", "dim")
    together = len([one for one in free if one.mig_index is None]) or 1
    joined = choose.describe_link(node, free)
    text = f"{plural(len(free), 'GPU')} free" + (f", {joined}" if joined else "")
    return Text(f"{text}; to use: muster gpus pick --num {together} -- python train.py", "dim")


def _without_gpus(node: Node) -> Text:
    cores = usable_cores()
    memory = format_bytes(node.cpu.total_bytes) if node.cpu.total_bytes else "unknown memory"
    limited = cores.value < (os.cpu_count() or 1)
    words = cores.reason if limited else f"{cores.value} cores"
    return Text(f"no GPU found; programs run on the CPU: {node.cpu.name}, {memory}, {words}")
