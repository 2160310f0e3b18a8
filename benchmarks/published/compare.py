"""Compare forecasts with published trainings, and write benchmarks/results/plan-published.md.

Rows that the product itself could train are traced as ``muster plan`` traces them; those with tensor, pipeline or context
parallelism, and speeds in float8, come from the formulas of ``benchmarks/published/models/decoder_memory.py``. Traces take about half a minute for a
row the first time; they are kept in a folder.

    python benchmarks/published/compare.py --cache /tmp/published
"""

import argparse
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import formulas  # noqa: E402
import traced  # noqa: E402
from rows import Published, Row, read  # noqa: E402

from torchmuster.plan.tracing.cache import TraceCache  # noqa: E402

PAGE = HERE.parent / "results" / "plan-published.md"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One figure of a row: what was published and what is forecast."""

    row: Row
    what: str  # reserved, allocated or speed
    published: float
    forecast: float
    how: str  # traced or formula

    @property
    def off(self) -> float:
        """By how much the forecast is too high, as a part of what was published."""
        return self.forecast / self.published - 1.0

    @property
    def is_judged(self) -> bool:
        """Say whether nothing was made to fit it."""
        return self.what != "speed" or self.row.use != "constant"


def memories(published: Published, by_trace: traced.Traced) -> Iterator[Result]:
    """Return a result for each published figure of memory."""
    for row in published.rows:
        if row.reserved_gib is None and row.allocated_gib is None:
            continue
        if row.weights != "float32" and not by_trace.knows_memory(row):
            continue  # the formulas are for states in float32
        if by_trace.knows_memory(row):
            found = by_trace.memory(row)
            forecast, tensors, how = found.reserved_gib, found.tensor_gib, "traced"
            tensors += row.whole_gradients_gib
            if forecast is None:
                forecast = formulas.RESERVED * tensors
                how = "traced, a fifth more"
        else:
            forecast, how = formulas.reserved_gib(row), "formula"
            tensors = forecast / formulas.RESERVED
        for what, told, said in (
            ("reserved", row.reserved_gib, forecast),
            ("allocated", row.allocated_gib, tensors),
        ):
            if told is not None:
                said_how = how if what == "reserved" else how.partition(",")[0]
                yield Result(row=row, what=what, published=told, forecast=said, how=said_how)


def speeds(published: Published, by_trace: traced.Traced) -> Iterator[Result]:
    """Return a result for each published speed."""
    by_formula = formulas.Formulas(published)
    for row in published.rows:
        told = row.published_tokens_per_s
        if told is None:
            continue
        if by_trace.knows_speed(row):
            said, how = by_trace.tokens_per_s(row, by_trace.constant(row.stack)), "traced"
        else:
            said, how = by_formula.tokens_per_s(row), "formula"
        yield Result(row=row, what="speed", published=told, forecast=said, how=how)


def page(published: Published, found: Sequence[Result], constants: Iterable[str]) -> str:
    """Return the page."""
    causes = tomllib.loads((HERE / "causes.toml").read_text(encoding="utf-8"))
    parts = [
        causes["page"]["before"].strip(),
        "## Targets and results",
        "\n".join(_summary(found)),
        causes["page"]["split"].strip(),
        "\n".join(f"- {line}" for line in constants),
        "## Memory",
        causes["page"]["memory"].strip(),
        _table((one for one in found if one.what != "speed"), causes["memory"], "GiB", 1),
        "## Speed",
        causes["page"]["speed"].strip(),
        _table((one for one in found if one.what == "speed"), causes["speed"], "tokens/s", 0),
        "## Sources",
        "\n".join(f"- `{name}`: {text}" for name, text in published.sources.items()),
        causes["page"]["after"].strip(),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(found: Sequence[Result]) -> Iterator[str]:
    reserved = [one for one in found if one.what == "reserved"]
    speed = [one for one in found if one.what == "speed" and one.is_judged]
    yield "| target | rows | within | mean error | worst |"
    yield "|---|---:|---:|---:|---|"
    groups: list[tuple[str, list[Result], float]] = [
        ("reserved, eager FSDP: within 10 %", [o for o in reserved if o.row.is_eager_fsdp], 0.1),
        (
            "reserved, all others: 70 % of them within 20 %",
            [one for one in reserved if not one.row.is_eager_fsdp],
            0.2,
        ),
        ("speed with one constant per stack: 80 % of them within 20 %", speed, 0.2),
    ]
    groups += [
        ("… of these, traced", [one for one in speed if one.how == "traced"], 0.2),
        ("… of these, by formula", [one for one in speed if one.how == "formula"], 0.2),
        (
            "peak of tensors (no target; counted: within 10 %)",
            [o for o in found if o.what == "allocated"],
            0.1,
        ),
    ]
    for words, those, bar in groups:
        if those:
            yield _counted(words, those, bar)


def _counted(words: str, those: Sequence[Result], bar: float) -> str:
    within = sum(abs(one.off) <= bar for one in those)
    mean = sum(abs(one.off) for one in those) / len(those)
    worst = max(those, key=lambda one: abs(one.off))
    return (
        f"| {words} | {len(those)} | {within} ({100 * within / len(those):.0f} %) | {mean:.1%} | "
        f"{worst.off:+.0%}: {worst.row.name} |"
    )


def _table(found: Iterable[Result], causes: dict[str, str], unit: str, digits: int) -> str:
    lines = [f"| row | stack | figure | published {unit} | forecast | error | method | note |"]
    lines.append("|---|---|---|---:|---:|---:|---|---|")
    for one in found:
        row = one.row
        notes = [] if one.is_judged else ["gives the constant"]
        notes += ["seen"] if row.seen and one.what == "reserved" else []
        notes += ["compiled"] if row.compile and one.what != "speed" else []
        cause = causes.get(row.name)
        notes += [cause] if cause and abs(one.off) > 0.1 else []
        lines.append(
            f"| {row.name} | {row.stack} | {one.what} | {one.published:,.{digits}f} | "
            f"{one.forecast:,.{digits}f} | {100 * one.off:+.1f} % | {one.how} | {'; '.join(notes)} |"
        )
    return "\n".join(lines)


def _constants(published: Published, by_trace: traced.Traced) -> Iterator[str]:
    by_formula = formulas.Formulas(published)
    for stack in dict.fromkeys(row.stack for row in published.rows):
        row = published.constant(stack)
        words = f"{stack}, from row {row.name}: formulas use {by_formula.constant(stack):.2f} of the bfloat16 peak rate"
        if by_trace.knows_speed(row):
            words += f", traces {by_trace.constant(stack):.2f} times the usual shares"
        yield words


def main() -> None:
    """Write the page, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="where traces are kept")
    parser.add_argument(
        "--only-kept", action="store_true", help="rows without kept traces come from formulas"
    )
    parser.add_argument("--out", type=Path, default=PAGE)
    chosen = parser.parse_args()
    published = read()
    with traced.tracer(chosen.cache) as tracer:
        kept = TraceCache(chosen.cache) if chosen.only_kept else None
        by_trace = traced.Traced(published, tracer, only_kept=kept)
        made: list[Callable[[Published, traced.Traced], Iterator[Result]]] = [memories, speeds]
        found = [one for make in made for one in make(published, by_trace)]
        text = page(published, found, _constants(published, by_trace))
    chosen.out.write_text(text, encoding="utf-8")
    print("\n".join(_summary(found)))


if __name__ == "__main__":
    main()
