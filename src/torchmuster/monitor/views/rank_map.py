"""The ranks of a run as a map: a place for each, shaded by how much of something it has, with the figure in it."""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from torchmuster.launch.hangs.heartbeat import Pulse
from torchmuster.monitor.views.odd_ranks import odd_ranks
from torchmuster.redaction import harmless
from torchmuster.units import plural

_MOST_RANKS = 512
_DEEP_SILENCE_S = 30.0
_FAR_BEHIND = 10  # steps; fewer are shaded less

Ranks = Sequence[tuple[str, Pulse]]
# What a rank's place has: its shade from 0 to 1, and its figure; None where it is not known.
Cell = tuple[float, str] | None


def rank_map(ranks: Ranks) -> str:
    """Return a map for each thing that is known of the ranks, and the odd ones among them in words."""
    if not ranks:
        return '<p class="quiet">no rank was heard of lately</p>'
    shown = ranks[:_MOST_RANKS]
    hosts = {host for host, _ in ranks}
    machines = f" on {len(hosts)} machines" if len(hosts) > 1 else ""
    left_out = f", the first {_MOST_RANKS} shown" if len(ranks) > _MOST_RANKS else ""
    count = f"{plural(len(ranks), 'rank')}{machines}{left_out}"
    parts = [f'<p class="quiet">{count}; the bluer, the more</p>']
    for words in odd_ranks([pulse for _, pulse in ranks]):
        parts.append(f'<p><b class="warning">{escape(words)}</b></p>')
    for title, cells in _maps([pulse for _, pulse in shown]):
        if any(cell is not None for cell in cells):
            places = "".join(
                _place(host, pulse, cell, title)
                for (host, pulse), cell in zip(shown, cells, strict=True)
            )
            parts.append(f'<div>{title}</div><div class="heat">{places}</div>')
    return "".join(parts)


def _maps(pulses: Sequence[Pulse]) -> Iterator[tuple[str, list[Cell]]]:
    yield (
        "waits for other ranks, % of its time",
        _each(pulses, lambda one: _share(one.communication_share)),
    )
    yield "waits for data, % of its time", _each(pulses, lambda one: _share(one.data_share))
    first = max((one.step for one in pulses if one.step is not None), default=0)
    yield "step (shaded: behind the first)", _each(pulses, lambda one: _step(one.step, first))
    yield (
        "Python did not run in it for so many seconds",
        _each(pulses, lambda one: _silence(one.silent_s)),
    )


def _each(pulses: Sequence[Pulse], cell: Callable[[Pulse], Cell]) -> list[Cell]:
    return [cell(one) for one in pulses]


def _share(share: float | None) -> Cell:
    return None if share is None else (share, f"{100 * share:.0f}")


def _step(step: int | None, first: int) -> Cell:
    return None if step is None else ((first - step) / _FAR_BEHIND, _short(step))


def _silence(silent_s: float) -> Cell:
    return silent_s / _DEEP_SILENCE_S, f"{silent_s:.0f}"


def _short(step: int) -> str:
    """Return a number of at most six signs: 12,345 or 1.234M."""
    return f"{step:,}" if step < 1_000_000 else f"{step / 1e6:.2f}M"


def _place(host: str, pulse: Pulse, cell: Cell, title: str) -> str:
    name = escape(harmless(f"rank {pulse.rank} on {host}: {title}"))
    if cell is None:
        return f'<span class="unknown" title="{name}"><small>{pulse.rank}</small>?</span>'
    shade = min(1.0, max(0.0, cell[0]))
    return f'<span style="--heat:{shade:.2f}" title="{name}"><small>{pulse.rank}</small>{cell[1]}</span>'
