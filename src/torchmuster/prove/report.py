"""The result of a proof: one screen, a page and JSON."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

import msgspec

from torchmuster.finding import Finding, render
from torchmuster.pages.charts import RULES, Axis, Curve, line_chart
from torchmuster.pages.frame import html_article, html_page, html_table
from torchmuster.prove import landlock
from torchmuster.prove.comparing import resumed_from
from torchmuster.prove.proof import Proof
from torchmuster.prove.records import TrialRecord
from torchmuster.redaction import printable
from torchmuster.units import format_seconds, plural

_NARROWEST, _WIDER = 1.5, 3.0  # widths of the curves
_NOT_WATCHED = "not watched: writes outside the copies of the folder (this kernel has no Landlock)"
DEVICES = {"cpu": "on the CPU", "gpu": "on GPUs"}
_CURVES = {"loss": "loss", "gradient_norm": "gradient norm", "learning_rate": "learning rate"}


def proof_screen(proof: Proof, folder: Path, *, width: int, colour: bool) -> str:
    """Return the result for a terminal."""
    outcomes = Counter(result.outcome for result in proof.results)
    counts = f"{outcomes['pass']} passed, {outcomes['fail']} failed"
    if outcomes["not tested"]:
        counts += f", {outcomes['not tested']} not tested"
    lines = [
        f"{proof.request.script}: {counts} ({_trial_summary(proof)})",
        "",
        render(_shown_findings(proof), width=width, colour=colour),
        "",
    ]
    if not landlock.is_available():
        lines += [_NOT_WATCHED, ""]
    lines.append(f"report: {folder / 'report.html'}")
    return "\n".join(lines)


def _shown_findings(proof: Proof) -> list[Finding]:
    """Return the findings; a difference that several stops show appears once."""
    shown: dict[str, Finding] = {}
    for result in proof.results:
        finding = result.finding
        if result.difference is None:
            shown[result.name] = finding
            continue
        first = shown.setdefault(finding.name, finding)
        if first is not finding:
            evidence = f"{first.evidence}\nalso: {finding.what}".strip()
            shown[finding.name] = replace(first, evidence=evidence)
    return list(shown.values())


def _trial_summary(proof: Proof) -> str:
    steps = proof.baseline.steps if proof.baseline else 0
    where = f"{plural(proof.request.ranks, 'rank')} {DEVICES[proof.request.device]}"
    runs = plural(proof.runs, "run")
    return f"{where}, {steps} steps, {runs} in {format_seconds(proof.took_s)}"


def proof_json(proof: Proof, folder: Path) -> dict[str, object]:
    """Return the result as plain JSON types."""
    return {
        "script": proof.request.script,
        "ranks": proof.request.ranks,
        "steps": proof.baseline.steps if proof.baseline else 0,
        "runs": proof.runs,
        "passed": not proof.failed,
        "confined_by_kernel": landlock.is_available(),
        "report": str(folder / "report.html"),
        "results": msgspec.to_builtins(proof.results),
    }


def proof_page(proof: Proof) -> str:
    """Return the result as a page with the curves of all runs over each other."""
    request = proof.request
    command = escape(printable(request.command))
    rows = []
    for result in proof.results:
        kind, step = "", ""
        if result.difference is not None:
            kind, step = result.difference.kind, str(result.difference.step)
        rows.append((result.name, result.outcome, kind, step))
    parts = [
        f"<h1>muster prove {escape(request.script)}</h1>",
        f"<p>{escape(_trial_summary(proof))}: <code>{command}</code></p>",
        html_table(("check", "result", "first difference", "in step"), rows),
        *map(html_article, _shown_findings(proof)),
    ]
    if proof.baseline is not None and proof.baseline.steps:
        for name, title in _CURVES.items():
            curves = list(_proof_curves(proof, name))
            if curves:
                chart = line_chart(
                    title, Axis(title="step", from_zero=False), Axis(title=title), curves
                )
                parts.append(f"<figure>{chart}</figure>")
    return html_page(f"muster prove {request.script}", parts, style=RULES)


def _proof_curves(proof: Proof, name: str) -> Iterator[Curve]:
    """Yield the curves from wide to narrow, so that each shows also where they are equal."""
    baseline = proof.baseline
    assert baseline is not None
    runs = [("undisturbed", baseline, 0)]
    if proof.repeated is not None:
        runs.append(("repeated", proof.repeated, 0))
    for trial in proof.resumed:
        if trial.resumed.steps:
            start = resumed_from(baseline, trial.resumed, trial.stopped.newest_step)
            if start is None:
                start = trial.stopped.newest_step
            runs.append((f"resumed: {trial.stop.name}", trial.resumed, start))
    for number, (title, record, begin) in enumerate(runs):
        points = []
        for step in range(record.steps):
            value = _value(record, name, step)
            if value is not None:
                points.append((float(begin + step + 1), value))
        if points:
            width = _NARROWEST + _WIDER * (len(runs) - 1 - number)
            yield Curve(name=title, points=points, width=width, marked=False)


def _value(record: TrialRecord, name: str, step: int) -> float | None:
    if name == "loss":
        return record.loss(step)
    if name == "gradient_norm":
        return record.gradient_norm(step)
    return next(iter(record.ranks[0].steps[step].learning_rates), None)
