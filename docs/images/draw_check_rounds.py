"""Draws check_rounds.svg: how many rounds a search takes, by the number of hosts.

The figures are those of ``docs/images/check_rounds.jsonl``, which ``tests/stress/check_scale.py`` makes.

    python docs/images/draw_check_rounds.py
"""

import json
import math
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIGURES = HERE / "check_rounds.jsonl"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 380, 60, 50, 20, 250
SIZES = (100, 1_000, 10_000, 100_000)
CURVES = {
    "machines": ("bad hosts", "#2e7d32"),
    "any dead link": ("dead hosts and links", "#6a1b9a"),
    "links of collectives": ("bad hosts, links of collectives", "#1565c0"),
    "any link": ("… and every other link", "#c62828"),
}


def _points(kind: str, lines: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the mean rounds for the fault that takes the most, with 20 bad ones."""
    found = []
    for size in SIZES:
        mine = [
            one["rounds"]
            for one in lines
            if (one["world"], one["count"], one["kind"], one["bad"])
            == ("as assumed", size, kind, 20)
        ]
        if mine:
            found.append((size, max(mine)))
    return found


def draw() -> str:
    """Return the picture as SVG."""
    lines = [json.loads(line) for line in FIGURES.read_text(encoding="utf-8").splitlines()]
    curves = {kind: _points(kind, lines) for kind in CURVES}
    top = 100 * math.ceil(max(rounds for points in curves.values() for _, rounds in points) / 100)

    def x(count: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(count) - 2) / 3

    def y(rounds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * rounds / top

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for rounds in range(0, top + 1, 100):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(rounds):.1f}" y2="{y(rounds):.1f}" '
            f'stroke="#dddddd"/><text x="{LEFT - 8}" y="{y(rounds) + 4:.1f}" '
            f'text-anchor="end">{rounds}</text>'
        )
    for size in SIZES:
        parts.append(
            f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{size:,}</text>'
        )
    for kind, points in curves.items():
        label, colour = CURVES[kind]
        path = " ".join(f"{x(size):.1f},{y(rounds):.1f}" for size, rounds in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(size):.1f}" cy="{y(rounds):.1f}" r="3" fill="{colour}"/>'
            for size, rounds in points
        ]
        last, most = points[-1]
        parts.append(
            f'<text x="{x(last) + 8:.1f}" y="{y(most) + 4:.1f}" fill="{colour}">{label}</text>'
        )
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">hosts</text>'
        f'<text x="16" y="{HEIGHT / 2:.0f}" transform="rotate(-90 16 {HEIGHT / 2:.0f})" '
        'text-anchor="middle">rounds</text></svg>'
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (HERE / "check_rounds.svg").write_text(draw(), encoding="utf-8")
