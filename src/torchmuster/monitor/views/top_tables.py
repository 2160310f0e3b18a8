"""The ranks of ``muster top``: a line for each."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from torchmuster.devices.model import Device
from torchmuster.devices.readers.nvml_events import OF_PROGRAMS
from torchmuster.monitor.views.bars import (
    MARK,
    QUIET,
    VERY_WIDE,
    WIDE,
    WRONG,
    Column,
    bar,
    column_lines,
    columns_that_fit,
    curve_of_percents,
)
from torchmuster.monitor.views.key_figures import SILENT_AFTER_S
from torchmuster.monitor.views.top_picture import ORDERS, DeviceRow, RankRow, ordered_rows
from torchmuster.redaction import harmless
from torchmuster.units import GiB, format_bytes, format_seconds

# More devices than this are shown as cells, unless lines are requested.
MOST_LINES = 16
_CELL = 24
# Reaching the power limit is normal under full load.
_USUAL = "power limit"
_NEARLY_FULL = 0.95


def device_lines(rows: Sequence[DeviceRow], width: int, *, cells: bool | None = None) -> list[Text]:
    """Return the part about the accelerators; ``cells`` None decides by their number."""
    if not rows:
        return []
    several = len({one.host for one in rows}) > 1
    if len(rows) > MOST_LINES if cells is None else cells:
        return list(_top_tables_cells(rows, width, several))
    return column_lines(_device_columns(rows, width, several), rows, width, marks={})


def short_name(device: Device) -> str:
    """Return the device name without the vendor prefix that every line would repeat."""
    return harmless(device.name.removeprefix("NVIDIA ").removeprefix("GeForce "))


def _device_columns(
    rows: Sequence[DeviceRow], width: int, several: bool
) -> list[Column[DeviceRow]]:
    wide = width >= WIDE
    bar_width = 18 if wide else 6 if several else 10
    names = {short_name(one.device) for one in rows}
    longest = max(map(len, names))
    looks = 24 if width >= VERY_WIDE else 12
    columns = [
        Column[DeviceRow](title="GPU", width=3, right=True, cell=_top_tables_number),
        Column[DeviceRow](
            title="busy",
            width=bar_width + 5,
            cell=lambda one: _busy(one.device, bar_width),
            matters=1,
        ),
        Column[DeviceRow](
            title="lately",
            width=looks,
            matters=9,
            cell=lambda one: curve_of_percents(one.busy_percents, looks),
        ),
        Column[DeviceRow](
            title="memory",
            width=bar_width + 12,
            cell=lambda one: _device_memory(one.device, bar_width),
            matters=2,
        ),
        Column[DeviceRow](
            title="temp", width=5, right=True, cell=lambda one: _temperature(one.device), matters=3
        ),
        Column[DeviceRow](
            title="power", width=9, right=True, cell=lambda one: _power(one.device), matters=5
        ),
        Column[DeviceRow](
            title="used by",
            width=14,
            takes_rest=True,
            cell=lambda one: _used_by(one, wide=wide),
            matters=4,
        ),
    ]
    if several:
        longest_host = max(len(one.host) for one in rows)
        host = Column[DeviceRow](
            title="host",
            width=min(max(longest_host, 4), 16),
            cell=lambda one: Text(harmless(one.host)),
        )
        columns.insert(0, host)
    if len(names) > 1:  # a common name is shown in the header
        name = Column[DeviceRow](
            title="name",
            width=min(longest, 22 if wide else 12),
            cell=lambda one: Text(short_name(one.device)),
            matters=6,
        )
        columns.insert(1 + several, name)
    return columns


def _top_tables_number(row: DeviceRow) -> Text:
    return Text(row.device.number, style="bold")


def _busy(device: Device, length: int) -> Text:
    percent = device.utilization_percent
    text = bar(None if percent is None else percent / 100, length)
    return text.append("    -" if percent is None else f"{percent:>4}%")


def _device_share(device: Device) -> float | None:
    if device.used_bytes is None or not device.usable_bytes:
        return None
    return device.used_bytes / device.usable_bytes


def _is_full(device: Device) -> bool:
    share = _device_share(device)
    return share is not None and share > _NEARLY_FULL


def _device_memory(device: Device, length: int) -> Text:
    full = _is_full(device)
    text = bar(_device_share(device), length, wrong=full).append(MARK if full else " ", style=WRONG)
    if device.total_bytes is None:
        return text.append("-", style=QUIET)
    total = f"{device.total_bytes / GiB:.0f} GiB"
    used = "" if device.used_bytes is None else f"{device.used_bytes / GiB:.0f}/"
    return text.append(f"{used}{total}".rjust(11))


def _is_hot(device: Device) -> bool:
    limit = device.slowdown_temperature_c
    return (
        device.temperature_c is not None and limit is not None and device.temperature_c >= limit - 3
    )


def _temperature(device: Device) -> Text:
    if device.temperature_c is None:
        return Text("-", style=QUIET)
    hot = _is_hot(device)
    return Text(f"{MARK if hot else ''}{device.temperature_c}°C", style=WRONG if hot else "")


def _power(device: Device) -> Text:
    if device.power_w is None:
        return Text("-", style=QUIET)
    limit = f"/{device.power_limit_w:.0f}" if device.power_limit_w else ""
    return Text(f"{device.power_w:.0f}{limit} W")


def _used_by(row: DeviceRow, *, wide: bool) -> Text:
    """Return the problems, then the users: on narrow screens the users are cut off first."""
    parts = [Text(MARK + one, style=WRONG) for one in _wrong(row.device, wide=wide)]
    if _USUAL in row.device.throttled_by:
        parts.append(Text("at power limit" if wide else "at limit", style=QUIET))
    users = _users(row, wide=wide)
    parts = [*([users] if users else []), *parts] if wide or not parts else [*parts, users]
    return Text("  " if wide else " ").join(one for one in parts if one)


def _wrong(device: Device, *, wide: bool) -> Iterator[str]:
    if device.trouble:
        yield f"does not answer: {device.trouble}" if wide else "lost"
    for reason in device.throttled_by:
        if reason != _USUAL:
            yield f"slowed by {reason}" if wide else reason.partition(" ")[0]
    if device.ecc is not None and device.ecc.uncorrected:
        yield f"{device.ecc.uncorrected} memory errors" if wide else "ECC"
    for number, count in device.xid_errors or ():
        if number not in OF_PROGRAMS:
            yield f"Xid {number} x{count}" if wide else f"Xid{number}"


def _users(row: DeviceRow, *, wide: bool) -> Text:
    text = Text()
    if row.ranks:
        numbers = ",".join(str(rank) for _, rank in row.ranks)
        text.append(f"rank {numbers}")
        if wide:
            jobs = ", ".join(sorted({harmless(job) for job, _ in row.ranks}))
            text.append(f"  {jobs}", style=QUIET)
    elif row.others:
        main = max(row.others, key=lambda one: one.memory_bytes or 0)
        text.append(main.user or f"pid {main.pid}")
        if wide and main.command:
            text.append(f"  {main.command}", style=QUIET)
    more = len(row.others) - (not row.ranks)
    if more > 0:
        text.append(f" +{more}", style=QUIET)
    return text


def _top_tables_cells(rows: Sequence[DeviceRow], width: int, several: bool) -> Iterator[Text]:
    """Yield lines of cells, grouped by host."""
    in_a_line = max(1, (width + 1) // (_CELL + 1))
    for host in dict.fromkeys(one.host for one in rows):
        if several:
            yield Text(harmless(host), style=QUIET)
        own = [one.device for one in rows if one.host == host]
        for at in range(0, len(own), in_a_line):
            cells = [_cell(one) for one in own[at : at + in_a_line]]
            yield Text(" ").join(cells)


def _cell(device: Device) -> Text:
    text = Text().append(f"{device.number:>3} ", style="bold")
    wrong = any(_wrong(device, wide=False)) or _is_hot(device) or _is_full(device)
    percent = device.utilization_percent
    text.append_text(bar(None if percent is None else percent / 100, 6))
    text.append("   -" if percent is None else f"{percent:>3}%")
    used = "-" if device.used_bytes is None else f"{device.used_bytes / GiB:.0f}G"
    heat = "-" if device.temperature_c is None else f"{device.temperature_c}°"
    text.append(f"{used:>5}{heat:>4}")
    return text.append(MARK if wrong else " ", style=WRONG)


# A rank that waits for data for more than this share is starved, as in the alert.
_STARVED = 0.3


def rank_lines(ranks: Sequence[RankRow], width: int, *, order: str, reverse: bool) -> list[Text]:
    """Return the titles and a line for each rank."""
    if not ranks:
        return []
    # Rank numbers sort ascending, all other columns descending.
    arrow = "▴" if (order == "rank") is not reverse else "▾"
    rows = ordered_rows(ranks, order, reverse=reverse)
    return column_lines(_rank_columns(ranks, width), rows, width, marks={order: arrow})


def orders_shown(ranks: Sequence[RankRow], width: int) -> list[str]:
    """Return the sort keys whose column is visible at this width."""
    return [
        one.title
        for one in columns_that_fit(_rank_columns(ranks, width), width)
        if one.title in ORDERS
    ]


def _rank_columns(ranks: Sequence[RankRow], width: int) -> list[Column[RankRow]]:
    bar_width = 14 if width >= VERY_WIDE else 8 if width >= WIDE else 3
    columns = [
        Column[RankRow](title="rank", width=5, right=True, cell=_rank),
        Column[RankRow](title="GPU", width=3, right=True, cell=_gpu, matters=4),
        Column[RankRow](title="step", width=9, right=True, cell=_top_tables_step, matters=1),
        Column[RankRow](title="silent", width=7, right=True, cell=_silent, matters=2),
        Column[RankRow](
            title="data",
            width=bar_width + 5,
            matters=3,
            cell=lambda one: _rank_share(
                one.heartbeat.data_share,
                bar_width,
                wrong=(one.heartbeat.data_share or 0) > _STARVED,
            ),
        ),
        Column[RankRow](
            title="others",
            width=bar_width + 5,
            matters=3,
            cell=lambda one: _rank_share(one.heartbeat.communication_share, bar_width),
        ),
        Column[RankRow](title="cpus", width=5, right=True, cell=_cpus, matters=6),
        Column[RankRow](title="memory", width=8, right=True, cell=_rank_memory, matters=5),
        Column[RankRow](
            title="busy",
            width=5,
            right=True,
            cell=lambda one: _top_tables_percent(one.device_busy),
            matters=9,
        ),
        Column[RankRow](title="on GPU", width=9, right=True, cell=_device_bytes, matters=10),
        Column[RankRow](title="pid", width=8, right=True, cell=_pid, matters=11),
        Column[RankRow](title="doing", width=10, cell=_doing, takes_rest=True, matters=7),
    ]
    if len({one.host for one in ranks}) > 1:
        longest = min(max(4, *(len(one.host) for one in ranks)), 16)
        host = Column[RankRow](
            title="host", width=longest, cell=lambda one: Text(harmless(one.host)), matters=4
        )
        columns.insert(1, host)
    if len({one.run for one in ranks}) > 1:
        longest = min(max(3, *(len(one.job) for one in ranks)), 16)
        run = Column[RankRow](title="run", width=longest, cell=lambda one: Text(harmless(one.job)))
        columns.insert(0, run)
    return columns


def _rank(row: RankRow) -> Text:
    return Text(str(row.heartbeat.rank), style="bold")


def _gpu(row: RankRow) -> Text:
    return Text(row.gpu) if row.gpu else Text("-", style=QUIET)


def _top_tables_step(row: RankRow) -> Text:
    step = row.heartbeat.step
    return Text("-", style=QUIET) if step is None else Text(f"{step:,}")


def _silent(row: RankRow) -> Text:
    wrong = row.heartbeat.silent_s > SILENT_AFTER_S
    text = format_seconds(row.heartbeat.silent_s)
    return Text(f"{MARK}{text}", style=WRONG) if wrong else Text(text)


def _rank_share(share: float | None, length: int, *, wrong: bool = False) -> Text:
    text = bar(share, length, wrong=wrong)
    if share is None:
        return text.append("    -", style=QUIET)
    return text.append(f"{MARK if wrong else ''}{share:.0%}".rjust(5), style=WRONG if wrong else "")


def _top_tables_percent(share: float | None) -> Text:
    return Text("-", style=QUIET) if share is None else Text(f"{share:.0%}")


def _cpus(row: RankRow) -> Text:
    busy = row.heartbeat.busy
    return Text("-", style=QUIET) if busy is None else Text(f"{busy:.1f}")


def _bytes(count: int | None) -> Text:
    return Text("-", style=QUIET) if count is None else Text(format_bytes(count))


def _rank_memory(row: RankRow) -> Text:
    return _bytes(row.heartbeat.memory_bytes)


def _device_bytes(row: RankRow) -> Text:
    return _bytes(row.device_bytes)


def _pid(row: RankRow) -> Text:
    return Text(str(row.heartbeat.pid), style=QUIET)


def _doing(row: RankRow) -> Text:
    """Return the rank's activity, and whether the other ranks wait for it."""
    heartbeat = row.heartbeat
    parts = [Text(f"{MARK}slowest", style=WRONG)] if row.holds_up else []
    parts += [Text(harmless(one)) for one in (heartbeat.phase, heartbeat.doing) if one]
    if heartbeat.place:
        parts.append(Text(harmless(heartbeat.place), style=QUIET))
    return Text("  ").join(parts)
