"""The picture of a card's memory for each way: an SVG that needs nothing else, readable without colours."""

from collections.abc import Iterator, Sequence
from html import escape

from torchmuster.plan.answer import Answer, Forecast, name_of
from torchmuster.plan.report.picture import Part, parts
from torchmuster.units import format_bytes

# Cividis at equal distances: those see it as well who cannot tell red from green.
_COLOURS = {
    "parameters": "#00224e",
    "gradients": "#2a3f6d",
    "optimizer": "#575d6d",
    "activations": "#7d7c78",
    "logits": "#a59c74",
    "collectives": "#d2c060",
    "temporaries": "#fee838",
}
_OTHER = "#dddddd"
_LIMIT = "#b00020"
_INK = "#1a1a1a"
_LEFT, _ROW, _BAR_HEIGHT, _TOP, _WIDE = 190, 34, 20, 44, 620
_FONT = "font-family:system-ui,sans-serif;font-size:11px"


def bars(answer: Answer) -> str:
    """Return a bar for each way, over what a card has."""
    rows = answer.table
    card, noun = answer.asked.hardware.card.memory_bytes, answer.asked.hardware.card.noun
    most = max([card, *(one.memory.high_bytes for one in rows)])
    most = min(most, 3 * card)  # what is far too large would make everything else small
    height = _TOP + len(rows) * _ROW + 64
    width = _LEFT + _WIDE + 110
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="memory of a {noun}">',
        f"<style>text{{{_FONT};fill:{_INK}}}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="20" style="font-size:14px;font-weight:600">'
        f"memory of a {noun} at the peak of a step</text>",
    ]
    for place, one in enumerate(rows):
        body += _row(one, _TOP + place * _ROW, _WIDE / most)
    x = _LEFT + card * _WIDE / most
    bottom = _TOP + len(rows) * _ROW
    body.append(
        f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="{_LIMIT}" '
        'stroke-width="2" stroke-dasharray="5 3"/>'
    )
    body.append(
        f'<text x="{x:.1f}" y="{_TOP - 12}" text-anchor="middle" style="fill:{_LIMIT}">'
        f"{escape(format_bytes(card))}</text>"
    )
    body += _legend(rows, bottom + 20, noun)
    return "\n".join([*body, "</svg>"]) + "\n"


def _row(one: Forecast, y: int, scale: float) -> Iterator[str]:
    again = "" if one.candidate.recompute == "none" else f", {one.candidate.recompute}"
    label = f"{name_of(one.candidate)}{again}"
    yield f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>'
    x = float(_LEFT)
    end = _LEFT + _WIDE + 8.0
    for part in parts(one):
        wide = min(part.size_bytes * scale, max(end - x, 0.0))
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_BAR_HEIGHT}" '
            f'fill="{_COLOURS.get(part.name, _OTHER)}" stroke="#ffffff" stroke-width="0.5">'
            f"<title>{escape(_tip(part))}</title></rect>"
        )
        x += wide
    low, high = (
        min(_LEFT + size * scale, end) for size in (one.memory.low_bytes, one.memory.high_bytes)
    )
    middle = y + _BAR_HEIGHT / 2
    yield (
        f'<path d="M{low:.1f} {middle - 4}v8M{low:.1f} {middle}H{high:.1f}M{high:.1f} {middle - 4}v8" '
        f'stroke="{_INK}" stroke-width="1.2" fill="none"/>'
    )
    size = format_bytes(one.memory.total_bytes)
    said = size if one.fits else f"✕ {size}"
    yield f'<text x="{min(max(x, high) + 6, end + 6):.1f}" y="{y + 14}">{escape(said)}</text>'


def _tip(part: Part) -> str:
    return f"{part.name}: {format_bytes(part.size_bytes)} ({part.source})"


def _legend(rows: Sequence[Forecast], y: int, noun: str) -> Iterator[str]:
    names = [name for name in _COLOURS if any(one.memory.by_category.get(name) for one in rows)]
    x = 12.0
    for name in [*names, "beside tensors"]:
        yield f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{_COLOURS.get(name, _OTHER)}"/>'
        yield f'<text x="{x + 16:.0f}" y="{y + 10}">{escape(name)}</text>'
        x += 28 + 6.6 * len(name)
    yield (
        f'<text x="12" y="{y + 30}">black lines: the band of each forecast; the dashed line: what a {noun} '
        "has; ✕ does not fit</text>"
    )
