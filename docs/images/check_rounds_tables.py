"""Write the tables of benchmarks/results/check-scale.md from ``docs/images/check_rounds.jsonl``.

Run it after that file has changed: ``python docs/images/check_rounds_tables.py``.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIGURES = HERE / "check_rounds.jsonl"
PAGE = HERE.parent / "measured" / "check-scale.md"
AS_ASSUMED = "as assumed"
MOST_BAD, USUAL_SIZE = 20, 10_000

Line = dict[str, Any]


def lines() -> list[Line]:
    found = [json.loads(line) for line in FIGURES.read_text(encoding="utf-8").splitlines()]
    return [{**line, "kind": line["kind"].replace("machines", "hosts")} for line in found]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    every = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in every)


def by_size(found: Sequence[Line]) -> str:
    """Return the cost of a search with the most faults, by the number of hosts."""
    mine = [one for one in found if one["world"] == AS_ASSUMED and one["bad"] == MOST_BAD]
    sizes = sorted({one["count"] for one in mine})
    rows = []
    for kind, fault in _distinct(mine, "kind", "fault"):
        searches = [one for one in mine if (one["kind"], one["fault"]) == (kind, fault)]
        cells = {
            one["count"]: f"{one['rounds']:.0f} rounds, {one['seconds']:,.0f} s" for one in searches
        }
        _, slope = fit([(one["count"], one["rounds"]) for one in searches])
        figures = [cells.get(size, "not run") for size in sizes]
        rows.append([kind, fault, *figures, f"{slope:.1f}"])
    return table(
        ["where", "fault", *(f"{size:,}" for size in sizes), "rounds added per doubling"], rows
    )


def by_number(found: Sequence[Line]) -> str:
    """Return the rounds in a group of the usual size, by the number of faults."""
    mine = [one for one in found if one["world"] == AS_ASSUMED and one["count"] == USUAL_SIZE]
    numbers = sorted({one["bad"] for one in mine})
    rows = []
    for kind, fault in _distinct(mine, "kind", "fault"):
        cells = {
            one["bad"]: f"{one['rounds']:.0f}"
            for one in mine
            if (one["kind"], one["fault"]) == (kind, fault)
        }
        rows.append([kind, fault, *(cells.get(number, "not run") for number in numbers)])
    return table(["where", "fault", *(f"{number} faulty" for number in numbers)], rows)


def right_and_wrong(found: Sequence[Line]) -> str:
    """Return how often searches found exactly the faults, by the number of hosts."""
    mine = [one for one in found if one["world"] == AS_ASSUMED]
    rows = [
        [f"{size:,}", *_counts([one for one in mine if one["count"] == size])]
        for size in sorted({one["count"] for one in mine})
    ]
    return table(["hosts", *_COUNTED], rows)


def elsewhere(found: Sequence[Line]) -> str:
    """Return the same for groups that violate the assumptions of the search."""
    mine = [one for one in found if one["world"] != AS_ASSUMED]
    rows = [
        [
            world,
            f"{kind}, {fault}",
            *_counts(
                [
                    one
                    for one in mine
                    if (one["world"], one["kind"], one["fault"], one["bad"])
                    == (world, kind, fault, number)
                ]
            ),
        ]
        for world, kind, fault, number in _distinct(mine, "world", "kind", "fault", "bad")
    ]
    return table(["group", "searched for", *_COUNTED], rows)


_COUNTED = ("searches", "exactly right", "faults", "missed", "false accusations")


def _counts(mine: Sequence[Line]) -> list[str]:
    bad = sum(one["seeds"] * one["bad"] for one in mine)
    sums = {
        name: sum(one[name] for one in mine) for name in ("seeds", "exact", "missed", "accused")
    }
    return [
        f"{number:,}"
        for number in (sums["seeds"], sums["exact"], bad, sums["missed"], sums["accused"])
    ]


def _distinct(found: Sequence[Line], *names: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(one[name] for name in names) for one in found))


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return a and b of rounds = a + b log2 N, by least squares."""
    x = [math.log2(count) for count, _ in points]
    y = [rounds for _, rounds in points]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    b = sum((one - mean_x) * (other - mean_y) for one, other in zip(x, y, strict=True)) / spread
    return mean_y - b * mean_x, b


TABLES = {
    "by-size": by_size,
    "by-number": by_number,
    "right-and-wrong": right_and_wrong,
    "elsewhere": elsewhere,
}


def written(page: str) -> str:
    """Return the page with new tables between their marks."""
    found = lines()
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{make(found)}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
