"""The ranks of ``muster top``: a line for each."""

from collections.abc import Sequence

from rich.text import Text

from torchmuster.monitor.views.bars import MARK, QUIET, VERY_WIDE, WIDE, WRONG, bar
from torchmuster.monitor.views.columns import Column, chosen, lines
from torchmuster.monitor.views.odd_ranks import SILENT_AFTER_S
from torchmuster.monitor.views.top_picture import ORDERS, RankRow, ordered
from torchmuster.redaction import harmless
from torchmuster.units import format_bytes, format_seconds

# A rank that waits for data for more than this is starved, as in the alert.
_STARVED = 0.3


def rank_lines(ranks: Sequence[RankRow], width: int, *, order: str, reverse: bool) -> list[Text]:
    """Return the titles and a line for each rank."""
    if not ranks:
        return []
    # Ranks themselves are counted upwards, everything else from the most downwards.
    arrow = "▴" if (order == "rank") is not reverse else "▾"
    rows = ordered(ranks, order, reverse=reverse)
    return lines(_columns(ranks, width), rows, width, marks={order: arrow})


def orders_shown(ranks: Sequence[RankRow], width: int) -> list[str]:
    """Return the orders whose column is to be seen at this width."""
    return [one.title for one in chosen(_columns(ranks, width), width) if one.title in ORDERS]


def _columns(ranks: Sequence[RankRow], width: int) -> list[Column[RankRow]]:
    bar_width = 14 if width >= VERY_WIDE else 8 if width >= WIDE else 3
    columns = [
        Column[RankRow](title="rank", width=5, right=True, cell=_rank),
        Column[RankRow](title="GPU", width=3, right=True, cell=_gpu, matters=4),
        Column[RankRow](title="step", width=9, right=True, cell=_step, matters=1),
        Column[RankRow](title="silent", width=7, right=True, cell=_silent, matters=2),
        Column[RankRow](
            title="data",
            width=bar_width + 5,
            matters=3,
            cell=lambda one: _share(
                one.pulse.data_share, bar_width, wrong=(one.pulse.data_share or 0) > _STARVED
            ),
        ),
        Column[RankRow](
            title="others",
            width=bar_width + 5,
            matters=3,
            cell=lambda one: _share(one.pulse.communication_share, bar_width),
        ),
        Column[RankRow](title="cpus", width=5, right=True, cell=_cpus, matters=6),
        Column[RankRow](title="memory", width=8, right=True, cell=_memory, matters=5),
        Column[RankRow](
            title="busy", width=5, right=True, cell=lambda one: _percent(one.device_busy), matters=9
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
    return Text(str(row.pulse.rank), style="bold")


def _gpu(row: RankRow) -> Text:
    return Text(row.gpu) if row.gpu else Text("-", style=QUIET)


def _step(row: RankRow) -> Text:
    step = row.pulse.step
    return Text("-", style=QUIET) if step is None else Text(f"{step:,}")


def _silent(row: RankRow) -> Text:
    wrong = row.pulse.silent_s > SILENT_AFTER_S
    text = format_seconds(row.pulse.silent_s)
    return Text(f"{MARK}{text}", style=WRONG) if wrong else Text(text)


def _share(share: float | None, length: int, *, wrong: bool = False) -> Text:
    text = bar(share, length, wrong=wrong)
    if share is None:
        return text.append("    -", style=QUIET)
    return text.append(f"{MARK if wrong else ''}{share:.0%}".rjust(5), style=WRONG if wrong else "")


def _percent(share: float | None) -> Text:
    return Text("-", style=QUIET) if share is None else Text(f"{share:.0%}")


def _cpus(row: RankRow) -> Text:
    busy = row.pulse.busy
    return Text("-", style=QUIET) if busy is None else Text(f"{busy:.1f}")


def _bytes(count: int | None) -> Text:
    return Text("-", style=QUIET) if count is None else Text(format_bytes(count))


def _memory(row: RankRow) -> Text:
    return _bytes(row.pulse.memory_bytes)


def _device_bytes(row: RankRow) -> Text:
    return _bytes(row.device_bytes)


def _pid(row: RankRow) -> Text:
    return Text(str(row.pulse.pid), style=QUIET)


def _doing(row: RankRow) -> Text:
    """Say what it is at, and whether all others wait for it."""
    pulse = row.pulse
    parts = [Text(f"{MARK}slowest", style=WRONG)] if row.holds_up else []
    parts += [Text(harmless(one)) for one in (pulse.phase, pulse.doing) if one]
    if pulse.place:
        parts.append(Text(harmless(pulse.place), style=QUIET))
    return Text("  ").join(parts)
