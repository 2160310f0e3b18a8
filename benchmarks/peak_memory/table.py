"""Write the results as Markdown tables: the distribution of errors, by strategy, and each miss."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

EXACT = 1e-4
_SHOWN_AS_MISS = 1e-3
Line = dict[str, Any]


def as_table(lines: Sequence[Line]) -> str:
    """Return all tables."""
    good = [line for line in lines if "measured_bytes" in line and "planned_bytes" in line]
    parts = [
        "# Predicted and measured peak memory of tensors",
        "Written by `benchmarks/plan_memory.py`. benchmarks/results/plan-accuracy.md describes the method.",
        _summary(lines, good),
        "## By strategy, dtype and model family",
        _by_strategy(good),
        "## Cases with an error above 0.1 %",
        _misses(lines, good),
    ]
    return "\n\n".join(parts)


def _error(line: Line, name: str) -> float:
    return float(line[name] / line["measured_bytes"] - 1)


def _row(name: str, errors: Sequence[float], failed: int) -> str:
    if not errors:
        return f"| {name} | 0 | {failed} | | | | | | |"
    sizes = sorted(map(abs, errors))
    shares = [sum(size <= limit for size in sizes) for limit in (EXACT, 0.01)]
    at_95 = sizes[min(len(sizes) - 1, round(0.95 * len(sizes)))]
    under = sum(error < -EXACT for error in errors)
    return (
        f"| {name} | {len(errors)} | {failed} | {shares[0]} | {shares[1]} | "
        f"{statistics.fmean(sizes):.3%} | {at_95:.3%} | {max(sizes):.2%} | {under} |"
    )


_HEAD = (
    "| prediction | cases | no result | exact (0.01 %) | within 1 % | mean error | 95 % of cases | worst | too low |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def _summary(lines: Sequence[Line], good: Sequence[Line]) -> str:
    failed = len(lines) - len(good)
    by_draw = [line for line in good if line["seed"] is not None]
    rows = [
        _row(
            "planned, as in `muster plan`",
            [_error(one, "planned_bytes") for one in good],
            failed,
        ),
        _row("traced whole", [_error(one, "traced_bytes") for one in good], failed),
        _row("planned, drawn cases only", [_error(one, "planned_bytes") for one in by_draw], 0),
    ]
    sizes = [line["measured_bytes"] / 2**20 for line in good]
    varied = sum(line["highest_bytes"] > (1 + EXACT) * line["measured_bytes"] for line in good)
    measured = ""
    if sizes:
        measured = (
            f"The measured peaks range from {min(sizes):.0f} to {max(sizes):.0f} MiB. "
            f"In {varied} of {len(good)} cases, the peaks of steady steps differed; the lowest peak is used."
        )
    return "\n".join([measured, "", _HEAD, *rows])


def _by_strategy(good: Sequence[Line]) -> str:
    names: list[tuple[str, Callable[[Line], str]]] = [
        ("strategy", lambda line: _strategy(line["case"])),
        ("dtype", lambda line: line["case"]["number_type"]),
        ("family", lambda line: line["case"]["family"]),
    ]
    rows = []
    for kind, key in names:
        for value in sorted({key(line) for line in good}):
            errors = [_error(one, "planned_bytes") for one in good if key(one) == value]
            rows.append(_row(f"{kind}: {value}", errors, 0))
    return "\n".join([_HEAD, *rows])


def _strategy(case: Line) -> str:
    if case["strategy"] == "fsdp" and case["copies"] > 1:
        return "hybrid"
    return str(case["strategy"])


def _misses(lines: Sequence[Line], good: Sequence[Line]) -> str:
    rows = [
        f"| `{line['name']}` | {line['measured_bytes'] / 2**20:.1f} | "
        f"{_error(line, 'planned_bytes'):+.3%} | {_error(line, 'traced_bytes'):+.3%} | {line['peak_in']} |"
        for line in good
        if abs(_error(line, "planned_bytes")) > _SHOWN_AS_MISS
        or abs(_error(line, "traced_bytes")) > _SHOWN_AS_MISS
    ]
    for line in lines:
        if line not in good:
            why = str(line.get("refused") or line.get("failed")).strip().splitlines()[-1]
            rows.append(f"| `{line['name']}` | | | | {why} |")
    if not rows:
        return "No case is off by 0.1 % or more, and none failed."
    head = "| case | measured MiB | planned | traced | peak in |\n|---|---|---|---|---|"
    return "\n".join([head, *rows])
