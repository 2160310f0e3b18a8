"""Draw plan-limits-*.svg: where DDP, FSDP and hybrid sharding stop paying, from 8 to 131,072 GPUs.

All figures are computed by ``benchmarks/published/models/decoder_memory.py``; nothing was measured. It also prints the tables of
docs/validation-plan.md.

    python docs/images/draw_plan_limits.py
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.plan.hardware import catalogue
from torchmuster.plan.hardware.catalogue import Hardware, Link
from torchmuster.plan.timing.rates import CATALOGUED

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks" / "published" / "models"))

import decoder_memory as beyond  # noqa: E402
from decoder_memory import Decoder, Portion, Spread  # noqa: E402
from decoder_time import Shares, step_time  # noqa: E402

SEQUENCE = 8192
BATCH = 2048  # sequences of a step: 16.8 million tokens, what Llama 3 405B ended with
SIZES = tuple(8 * 2**power for power in range(15))
# What Meta's own training of 405B reached with 8,192 GPUs (docs/measured/plan-published.md).
SHARE = 0.51
RESERVED = 1.2  # what the allocator holds for each byte of tensors
USABLE = 0.95

MODELS = {
    "Llama 1B": Decoder(
        blocks=16, width=2048, inner=8192, heads=32, key_heads=8, vocabulary=128256, head_width=64
    ),
    "Llama 8B": Decoder(
        blocks=32, width=4096, inner=14336, heads=32, key_heads=8, vocabulary=128256
    ),
    "Llama 70B": Decoder(
        blocks=80, width=8192, inner=28672, heads=64, key_heads=8, vocabulary=128256
    ),
    "Llama 405B": Decoder(
        blocks=126, width=16384, inner=53248, heads=128, key_heads=8, vocabulary=128256
    ),
}
COLOURS = {
    "DDP": "#8c6d1f",
    "FSDP": "#1565c0",
    "hybrid": "#2e7d32",
    "with TP 8": "#c62828",
    "with TP 8 and PP": "#6a1b9a",
}
MARKS = {
    "DDP": "6 3",
    "FSDP": "",
    "hybrid": "2 2",
    "with TP 8": "8 2 2 2",
    "with TP 8 and PP": "1 3",
}
FAMILIES = tuple(COLOURS)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The fastest way of one family that fits."""

    spread: Spread
    portion: Portion
    tokens_per_s: float  # of all cards
    use: float  # of what the cards could do


def hardware(cards: int) -> Hardware:
    """Return so many H100 with 400 Gb/s each."""
    known = catalogue.known_gpu("H100")
    return Hardware(
        card=known.card,
        machines=math.ceil(cards / 8),
        cards_per_machine=8,
        within=known.within,
        between=Link(latency_s=4e-6, bytes_s=50e9),
    )


def spreads(family: str, cards: int) -> Iterator[Spread]:
    """Return the ways of a family to use all cards."""
    if family == "DDP":
        yield Spread(copies=cards)
    if family == "FSDP":
        yield Spread(shards=cards)
    if family == "hybrid":
        for shards in _powers(8, cards // 2):
            yield Spread(copies=cards // shards, shards=shards)
    if family == "with TP 8":
        for shards in _powers(1, cards // 8):
            yield Spread(copies=cards // 8 // shards, shards=shards, tensor=8)
    if family == "with TP 8 and PP":
        for stages in _powers(2, min(cards // 8, 16)):
            for shards in _powers(1, cards // 8 // stages):
                yield Spread(
                    copies=cards // 8 // stages // shards,
                    shards=shards,
                    tensor=8,
                    pipeline=stages,
                    chunks=4,
                )


def _powers(low: int, high: int) -> Iterator[int]:
    while low <= high:
        yield low
        low *= 2


def best(
    decoder: Decoder, family: str, cards: int, *, sequences: Callable[[Spread], float]
) -> Found | None:
    """Return the fastest way of a family that fits; None where none does."""
    found: Found | None = None
    at = hardware(cards)
    for spread in spreads(family, cards):
        each = sequences(spread)
        if each < 1 or each != int(each):
            continue
        for size in (1, 2, 4):
            for recompute in ("none", "op", "full"):
                if each % size:
                    continue
                portion = Portion(
                    sequence_length=SEQUENCE,
                    batch=int(each),
                    micro_batches=int(each) // size,
                    recompute=recompute,
                )
                one = _evaluated(decoder, spread, portion, at)
                if one is not None and (found is None or one.tokens_per_s > found.tokens_per_s):
                    found = one
    return found


def _evaluated(decoder: Decoder, spread: Spread, portion: Portion, at: Hardware) -> Found | None:
    needed = RESERVED * sum(beyond.memory(decoder, spread, portion).values())
    if needed > USABLE * at.card.memory_bytes:
        return None
    time = step_time(
        decoder,
        spread,
        portion,
        hardware=at,
        shares=Shares(products=SHARE, attention=SHARE),
        rates=CATALOGUED,
    )
    tokens = portion.batch * spread.data * SEQUENCE / time.step_s
    able = at.card.flops["bfloat16"] * spread.ranks
    return Found(
        spread=spread,
        portion=portion,
        tokens_per_s=tokens,
        # Of all pairs of tokens only half are computed, so attention counts as for half the length.
        use=tokens * decoder.model_flops(SEQUENCE // 2) / able,
    )


def fixed(spread: Spread) -> float:
    """The same batch whatever the number of cards."""
    return BATCH / spread.data


def growing(spread: Spread) -> float:
    """One sequence for each card, so that the batch grows with them."""
    return float(spread.tensor * spread.pipeline)


Curves = dict[str, dict[int, Found]]


def curves(decoder: Decoder, sequences: Callable[[Spread], float]) -> Curves:
    """Return the best of each family, by the number of cards."""
    made: Curves = {}
    for family in FAMILIES:
        points = {size: best(decoder, family, size, sequences=sequences) for size in SIZES}
        made[family] = {size: one for size, one in points.items() if one is not None}
    return made


WIDTH, HEIGHT, LEFT, TOP, GAP = 900, 670, 52, 64, 60
PANEL_WIDTH, PANEL_HEIGHT = (WIDTH - LEFT - GAP - 20) / 2, (HEIGHT - TOP - GAP - 56) / 2
HIGHEST = 0.6


def draw(title: str, panels: dict[str, Curves]) -> str:
    """Return four panels: what of the cards' rate is used, over the number of cards."""
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="600">{title}</text>',
        *_legend(),
    ]
    for number, (name, made) in enumerate(panels.items()):
        left = LEFT + (number % 2) * (PANEL_WIDTH + GAP)
        top = TOP + 16 + (number // 2) * (PANEL_HEIGHT + GAP)
        parts += _panel(name, made, left, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    for number, family in enumerate(FAMILIES):
        x = LEFT + number * 160
        yield _line([(x, 42), (x + 26, 42)], family)
        yield f'<text x="{x + 32}" y="46">{family}</text>'


def _line(points: Sequence[tuple[float, float]], family: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{MARKS[family]}"' if MARKS[family] else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{COLOURS[family]}" '
        f'stroke-width="2"{dashes}/>'
    )


def _panel(name: str, made: Curves, left: float, top: float) -> Iterator[str]:
    def x(cards: int) -> float:
        return left + PANEL_WIDTH * (math.log2(cards) - 3) / (math.log2(SIZES[-1]) - 3)

    def y(use: float) -> float:
        return top + PANEL_HEIGHT * (1 - use / HIGHEST)

    for percent in range(0, 61, 10):
        level = y(percent / 100)
        yield (
            f'<line x1="{left:.0f}" x2="{left + PANEL_WIDTH:.0f}" y1="{level:.1f}" '
            f'y2="{level:.1f}" stroke="#e0e0e0"/>'
        )
        yield f'<text x="{left - 5:.0f}" y="{level + 4:.1f}" text-anchor="end">{percent} %</text>'
    for cards in SIZES[::2]:
        word = f"{cards:,}" if cards < 10_000 else f"{round(cards / 1024)}k"
        yield (
            f'<text x="{x(cards):.1f}" y="{top + PANEL_HEIGHT + 14:.0f}" '
            f'text-anchor="middle">{word}</text>'
        )
    yield f'<text x="{left + 6:.0f}" y="{top + 13:.0f}" font-weight="600">{name}</text>'
    for family, points in made.items():
        if not points:
            continue
        yield _line([(x(cards), y(one.use)) for cards, one in points.items()], family)
        for cards, one in points.items():
            yield (
                f'<circle cx="{x(cards):.1f}" cy="{y(one.use):.1f}" r="2.2" '
                f'fill="{COLOURS[family]}"/>'
            )


def table(panels: dict[str, Curves]) -> str:
    """Return the figures behind a picture as a table."""
    sizes = (8, 128, 1024, 2048, 4096, 16384, 131072)
    lines = ["| model | way | " + " | ".join(f"{size:,}" for size in sizes) + " |"]
    lines.append("|---|---|" + "---:|" * len(sizes))
    for name, made in panels.items():
        for family, points in made.items():
            cells = [f"{100 * points[size].use:.0f} %" if size in points else "-" for size in sizes]
            lines.append(f"| {name} | {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def padding() -> str:
    """Return how many times its own size a gathered block has, by shards."""
    sizes = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 100_000)
    lines = ["| model | " + " | ".join(f"{size:,}" for size in sizes) + " |"]
    lines.append("|---|" + "---:|" * len(sizes))
    for name, decoder in MODELS.items():
        cells = [f"{beyond.inflation(decoder, size):.2f}" for size in sizes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Draw both pictures, and print the tables."""
    for name, title, sequences in (
        ("fixed", "A batch of 16.8 million tokens on ever more H100: share of their rate", fixed),
        ("growing", "A sequence of 8,192 tokens for each H100: share of their rate", growing),
    ):
        panels = {model: curves(decoder, sequences) for model, decoder in MODELS.items()}
        (HERE / f"plan-limits-{name}.svg").write_text(draw(title, panels), encoding="utf-8")
        print(f"{title}\n\n{table(panels)}\n")
    print(padding())


if __name__ == "__main__":
    main()
