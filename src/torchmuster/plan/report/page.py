"""Render a plan as one HTML page that needs no other file and no network."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import msgspec

from torchmuster.finding import worst_first
from torchmuster.pages import frame
from torchmuster.pages.frame import html_article, html_details
from torchmuster.pages.frame import html_table as cells
from torchmuster.plan.answer import Answer, Forecast, Offer, candidate_name
from torchmuster.plan.hardware.cluster_file import describe_hardware
from torchmuster.plan.planning import cost_of
from torchmuster.plan.report.terminal import (
    OFFERS_REMARK,
    MemoryPart,
    memory_parts,
    offer_text,
    plan_question,
    plan_remarks,
    plan_table,
    scaling_table,
)
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search.decide import describe_passed_over
from torchmuster.units import format_bytes

# Evenly spaced colours of Cividis, which is readable with colour-vision deficiency.
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


def memory_bars(answer: Answer) -> str:
    """Return an SVG with a memory bar per candidate, against the memory of a GPU."""
    rows = answer.table
    card, noun = answer.asked.hardware.card.memory_bytes, answer.asked.hardware.card.noun
    most = max([card, *(one.memory.high_bytes for one in rows)])
    most = min(most, 3 * card)  # one huge bar would make all others too small to read
    height = _TOP + len(rows) * _ROW + 64
    width = _LEFT + _WIDE + 110
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="memory per {noun}">',
        f"<style>text{{{_FONT};fill:{_INK}}}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="20" style="font-size:14px;font-weight:600">'
        f"memory per {noun} at the peak of a step</text>",
    ]
    for place, one in enumerate(rows):
        body += _page_row(one, _TOP + place * _ROW, _WIDE / most)
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


def _page_row(one: Forecast, y: int, scale: float) -> Iterator[str]:
    again = "" if one.candidate.recompute == "none" else f", {one.candidate.recompute}"
    label = f"{candidate_name(one.candidate)}{again}"
    yield f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>'
    x = float(_LEFT)
    end = _LEFT + _WIDE + 8.0
    for part in memory_parts(one):
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


def _tip(part: MemoryPart) -> str:
    return f"{part.name}: {format_bytes(part.size_bytes)} ({part.source})"


def _legend(rows: Sequence[Forecast], y: int, noun: str) -> Iterator[str]:
    names = [name for name in _COLOURS if any(one.memory.by_category.get(name) for one in rows)]
    x = 12.0
    for name in [*names, "other than tensors"]:
        yield f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{_COLOURS.get(name, _OTHER)}"/>'
        yield f'<text x="{x + 16:.0f}" y="{y + 10}">{escape(name)}</text>'
        x += 28 + 6.6 * len(name)
    yield (
        f'<text x="12" y="{y + 30}">black lines: band of each forecast; dashed line: memory of a '
        f"{noun}; ✕ does not fit</text>"
    )


# Increased when a key changes its meaning or is removed; new keys may be added at any time.
SCHEMA = 1


def plan_json(answer: Answer, *, line: str, settings: dict[str, str]) -> dict[str, Any]:
    """Return the whole plan as plain JSON types."""
    asked, second = answer.asked, answer.runner_up
    return {
        "schema": SCHEMA,
        "fits": True,
        "work": _page_plain(asked.work),
        "hardware": {**_page_plain(asked.hardware), "words": describe_hardware(asked.hardware)},
        "precision": {"value": asked.precision.value, "reason": asked.precision.reason},
        "global_batch_size": asked.global_batch_size,
        "parameter_count": answer.parameter_count,
        "tokens_per_sample": answer.tokens_per_sample,
        "chosen": {**_forecast(answer.chosen.value, asked), "reason": answer.chosen.reason},
        "runner_up": second and {**_forecast(second.value, asked), "reason": second.reason},
        "would_change": list(answer.would_change),
        "offers": [_offer(one) for one in answer.offers],
        "table": [_forecast(one, asked) for one in answer.table],
        "passed_over": [_page_plain(one) for one in answer.passed_over],
        "findings": [one.as_json() for one in worst_first(answer.findings)],
        "sources": [{"figure": kind, "source": source} for kind, source in answer.sources],
        "settings": settings,
        "command": line,
        "seconds": round(answer.took_s, 2),
    }


def _forecast(one: Forecast, asked: PlanRequest) -> dict[str, Any]:
    cost = cost_of(one, asked)
    return {
        "name": candidate_name(one.candidate),
        "fits": one.fits,
        "tight": one.is_tight,
        "spare_bytes": one.spare_bytes,
        "host_spare_bytes": one.host_spare_bytes,
        "samples_per_s": one.samples_per_s,
        "candidate": _page_plain(one.candidate),
        "memory": _page_plain(one.memory),
        "time": _page_plain(one.time),
        "scaling_efficiency": None if one.time is None else one.time.scaling_efficiency,
        "cost": None if cost is None else _page_plain(cost),
    }


def _offer(one: Offer) -> dict[str, Any]:
    return {
        "name": one.name,
        "lora_rank": one.rank,
        "trained_count": one.trained_count,
        "settings": dict(one.settings),
        "flags": one.flags,
        "forecast": _forecast(one.forecast, one.asked),
    }


def _page_plain(value: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def plan_page(answer: Answer, *, line: str) -> str:
    """Return the page. All external text is escaped, never inserted as markup."""
    titles, rows = plan_table(answer)
    parts = [
        f'<h1>muster plan: <b class="ok">{escape(answer.chosen.reason.partition(":")[0])}</b></h1>',
        f"<p>{escape(plan_question(answer))}</p>",
        f"<p>{escape(answer.chosen.reason)}</p>",
        f"<pre>{escape(line)}</pre>",
        *(html_article(one) for one in answer.findings),
        f"<figure>{memory_bars(answer)}</figure>",
        cells(titles, rows),
        "<ul>",
        *(f"<li>{escape(sentence)}</li>" for sentence in _sentences(answer)),
        "</ul>",
        html_details(
            "Sources of the figures", cells(("figure", "source"), answer.sources), opened=True
        ),
    ]
    return frame.html_page("muster plan", parts)


def _sentences(answer: Answer) -> list[str]:
    found = [] if answer.runner_up is None else [f"runner-up: {answer.runner_up.reason}"]
    found += answer.would_change
    if answer.offers:
        found += [OFFERS_REMARK, *(f"{offer_text(one)}; {one.flags}" for one in answer.offers)]
    found += [sentence for sentence in (scaling_table(answer), *plan_remarks(answer)) if sentence]
    return found + describe_passed_over(answer.passed_over)
