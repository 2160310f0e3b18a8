"""The table of ``muster gpus``, in colour."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchmuster.cli import output
from torchmuster.devices import choose
from torchmuster.devices.model import Device, Node
from torchmuster.devices.processes import age_s
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.request import WORTH_MENTIONING_IDLE_S, Claim, in_use_by
from torchmuster.devices.visibility import Visible
from torchmuster.finding import render
from torchmuster.units import GiB, format_bytes, format_seconds, plural

Update = Callable[[Node, Visible, Mapping[str, Claim]], None]
# Without a terminal there is no width limit; this fits the whole table.
PIPE_WIDTH = 160
# Narrower terminals leave out the bar and the load, or temperature and power; never the users.
ROOMY, WIDE = 70, 90
BAR_LENGTH = 10


def show(node: Node, shown: Visible, claims: Mapping[str, Claim]) -> None:
    """Print the table once, and the findings below it."""
    console = _console()
    for part in _parts(node, shown, claims, console.width):
        console.print(part)


@contextmanager
def live() -> Iterator[Update]:
    """Show a table that is redrawn in place; without a terminal, print one below the other."""
    console = _console()

    def screen(node: Node, shown: Visible, claims: Mapping[str, Claim]) -> RenderableType:
        return Group(*_parts(node, shown, claims, console.width))

    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda node, shown, claims: console.print(screen(node, shown, claims), "")
        return
    with Live(console=console, auto_refresh=False, screen=True) as view:
        yield lambda node, shown, claims: view.update(screen(node, shown, claims), refresh=True)


def _console() -> Console:
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(
        highlight=False,
        no_color=bool(os.environ.get("NO_COLOR")),
        width=PIPE_WIDTH if piped else None,
    )


def _parts(
    node: Node, shown: Visible, claims: Mapping[str, Claim], width: int
) -> Iterator[RenderableType]:
    free = []
    for device in shown.devices:
        if device.uuid not in claims and not device.trouble and not in_use_by(device):
            free.append(device)
    yield _headline(node, free)
    if node.accelerators:
        yield Text()
        yield _table(node, shown, claims, width)
        yield Text()
        yield Text(_hint(node, shown, free), "dim")
    else:
        cores = usable_cores()
        memory = format_bytes(node.cpu.total_bytes) if node.cpu.total_bytes else "unknown memory"
        limited = cores.value < (os.cpu_count() or 1)
        count = cores.reason if limited else f"{cores.value} cores"
        yield Text(f"no GPU found; programs run on the CPU: {node.cpu.name}, {memory}, {count}")
    findings = [*node.findings, *shown.findings]
    if findings:
        text = Text.from_ansi(render(findings, width=width, colour=output.wants_colour(sys.stdout)))
        # It is wrapped already, and commands must stay on one line for copying.
        text.no_wrap, text.overflow = True, "ignore"
        yield Text()
        yield text


def _headline(node: Node, free: Sequence[Device]) -> Text:
    facts = []
    if node.accelerators:
        usable = 0
        for device in node.accelerators:
            usable += device.mig_index is not None or not device.mig_enabled
        facts.append(f"{plural(usable, 'GPU')}, {len(free)} free")
    if node.driver_version:
        facts.append(f"driver {node.driver_version}")
    if node.cuda_version:
        facts.append(f"CUDA up to {node.cuda_version}")
    text = Text(node.hostname, style="bold")
    return text.append("".join(f"  ·  {fact}" for fact in facts), style="not bold")


def _table(node: Node, shown: Visible, claims: Mapping[str, Claim], width: int) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False, expand=True)
    table.add_column("GPU", justify="right", no_wrap=True, style="bold")
    table.add_column("name", no_wrap=True)
    if width >= ROOMY:
        table.add_column("memory", no_wrap=True)
    table.add_column("" if width >= ROOMY else "memory", justify="right", no_wrap=True)
    if width >= ROOMY:
        table.add_column("busy", justify="right", no_wrap=True)
    if width >= WIDE:
        table.add_column("temp", justify="right", no_wrap=True)
        table.add_column("power", justify="right", no_wrap=True)
    table.add_column("used by", no_wrap=True, overflow="ellipsis", ratio=1, min_width=12)
    for device in node.accelerators:
        cells: list[RenderableType] = [Text(device.number), _short_name(device)]
        if width >= ROOMY:
            cells.append(_bar(device))
        cells.append(_memory(device))
        if width >= ROOMY:
            cells.append(_percent(device.utilization_percent))
        if width >= WIDE:
            cells += [_temperature(device), _power(device)]
        cells.append(_used_by(device, shown, claims.get(device.uuid), node.taken_unix_s))
        table.add_row(*cells, style="dim" if device.uuid in shown.hidden_by else "")
    return table


def _short_name(device: Device) -> Text:
    """Return the name without the vendor's prefix; for a MIG slice, its profile."""
    name = device.name.removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("AMD ")
    return Text(f"└ {name.rpartition(' ')[2]}" if device.mig_index is not None else name)


def _bar(device: Device) -> Text:
    if not device.total_bytes or device.used_bytes is None:
        return Text(" " * BAR_LENGTH)
    share = device.used_bytes / device.total_bytes
    filled = max(round(share * BAR_LENGTH), int(share > 0.02))
    style = "green"
    if share > 0.5:
        style = "red" if share > 0.9 else "yellow"
    bar = Text("━" * filled, style=style)
    return bar.append("─" * (BAR_LENGTH - filled), style="bright_black")


def _memory(device: Device) -> Text:
    if device.total_bytes is None:
        return Text("-")
    total = f"{device.total_bytes / GiB:.0f} GiB"
    if device.used_bytes is None:
        return Text(total)
    return Text(f"{device.used_bytes / GiB:.1f} / {total}")


def _percent(value: int | None) -> Text:
    if value is None:
        return Text("-", style="dim")
    return Text(f"{value} %", style="bold" if value >= 50 else "")


def _temperature(device: Device) -> Text:
    if device.temperature_c is None:
        return Text("-", style="dim")
    hot = device.temperature_c >= (device.slowdown_temperature_c or 90) - 5
    return Text(f"{device.temperature_c} °C", style="bold red" if hot else "")


def _power(device: Device) -> Text:
    if device.power_w is None:
        return Text("-")
    limit = f" / {device.power_limit_w:.0f}" if device.power_limit_w else ""
    return Text(f"{device.power_w:.0f}{limit} W")


def _used_by(device: Device, shown: Visible, claim: Claim | None, now_unix_s: float) -> Text:
    hidden_by = shown.hidden_by.get(device.uuid, "")
    user = in_use_by(device)
    if device.trouble:
        return Text(f"does not answer: {device.trouble}", style="bold red")
    if claim is not None:
        since = format_seconds(max(now_unix_s - claim.since_unix_s, 0))
        return _line((claim.user, "cyan"), (f"claimed {since}", ""), (claim.command, "dim"))
    if device.mig_enabled and device.mig_index is None:
        return Text("split into MIG slices", style="dim")
    if device.compute_processes:
        return _processes(device, now_unix_s)
    if hidden_by:
        return Text(f"hidden by {hidden_by.partition('=')[0]}")
    if user:
        return Text(user, style="yellow")
    return Text("free", style="green")


def _processes(device: Device, now_unix_s: float) -> Text:
    """Return the process with the most memory, and the number of others."""
    processes = device.compute_processes
    main = max(processes, key=lambda process: process.memory_bytes or 0)
    age = age_s(main, now_unix_s)
    since = ("" if age is None else format_seconds(age), "")
    if main.idle_s is not None and main.idle_s >= WORTH_MENTIONING_IDLE_S:
        since = (f"idle {format_seconds(main.idle_s)}", "yellow")
    more = f"+{len(processes) - 1} more" if len(processes) > 1 else ""
    user = main.user or f"pid {main.pid}"
    return _line((user, "cyan"), since, (more, ""), (main.command or "", "dim"))


def _line(*parts: tuple[str, str]) -> Text:
    return Text("  ").join(Text(text, style=style) for text, style in parts if text)


def _hint(node: Node, shown: Visible, free: Sequence[Device]) -> str:
    if not shown.devices:
        return f"all GPUs are hidden by {', '.join(sorted(set(shown.hidden_by.values())))}"
    if not free:
        return "none free; to wait: muster gpus pick --wait python train.py"
    whole = [device for device in free if device.mig_index is None]
    joined = choose.describe_link(node, free)
    link = f", {joined}" if joined else ""
    number = len(whole) or 1
    return (
        f"{plural(len(free), 'GPU')} free{link}; "
        f"to use: muster gpus pick --num-gpus {number} python train.py"
    )
