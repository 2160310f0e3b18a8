"""The page of assumptions, generated from the data and from the result files that were sent."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torchmuster.selftest.assumptions import Assumption, known_assumptions, status_of
from torchmuster.selftest.hardware import NEEDS
from torchmuster.selftest.record import SelftestRecord, read_record

RESULTS = Path(__file__).resolve().parents[1] / "measured" / "selftest"


def page() -> str:
    """Return the whole page."""
    records = [read_record(path) for path in sorted(RESULTS.glob("*.json"))]
    return "\n".join(_page_lines(records)) + "\n"


def _page_lines(records: list[SelftestRecord]) -> Iterator[str]:
    known = known_assumptions()
    yield "# Assumptions: what has not been tested"
    yield f"\n{known.intro.strip()}\n"
    yield "| not tested | tested instead |"
    yield "|---|---|"
    yield from (f"| {one.not_tested} | {one.instead} |" for one in known.scope)
    counts = Counter(status_of(one, records).partition(" ")[0] for one in known.all)
    checked = sum(bool(one.check) for one in known.all)
    yield (
        f"\nOf {len(known.all)} assumptions, {counts['confirmed']} are confirmed, {counts['refuted']} refuted and "
        f"{counts['untested']} untested. `muster selftest` checks {checked} of them on hardware that has what they need "
        "([Run it on your GPUs](selftest.md)). Result files: "
        + (
            ", ".join(
                f"[{path.stem}](measured/selftest/{path.name})"
                for path in sorted(RESULTS.glob("*.json"))
            )
            or "none"
        )
        + ".\n"
    )
    yield "This page is generated from `src/torchmuster/selftest/assumptions.toml`."
    for section in known.section:
        yield f"\n## {section.title}\n"
        if section.intro:
            yield f"{section.intro.strip()}\n"
        for one in section.assumption:
            yield from _entry(one, status_of(one, records))


def _entry(one: Assumption, status: str) -> Iterator[str]:
    yield f"- {one.text}" + (f" Tested {one.tested}." if one.tested else "")
    needs = ", ".join(NEEDS[need] for need in one.needs)
    check = f"; check `{one.check}`" if one.check else ""
    yield f"  <br>*{status}* (`{one.id}`{check}; needs {needs}). Shown if: {one.shown_by}."
