"""The result of a proof: one screen, a page, JSON and JUnit XML."""

import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

from torchmuster.finding import Finding, Status, render
from torchmuster.pages.charts import RULES, Axis, Curve, line_chart
from torchmuster.pages.frame import html_article, html_page, html_table
from torchmuster.prove.comparing import resumed_from
from torchmuster.prove.proof import Proof, Result
from torchmuster.prove.records import TrialRecord
from torchmuster.redaction import printable
from torchmuster.units import format_seconds, plural

_CURVES = {"loss": "loss", "gradient_norm": "gradient norm", "learning_rate": "learning rate"}


def proof_screen(proof: Proof, folder: Path, *, width: int, colour: bool) -> str:
    """Return the result for a terminal."""
    failed = sum(result.outcome == "fail" for result in proof.results)
    skipped = sum(result.outcome == "not tested" for result in proof.results)
    passed = len(proof.results) - failed - skipped
    counts = [f"{passed} passed", f"{failed} failed"]
    if skipped:
        counts.append(f"{skipped} not tested")
    lines = [
        f"{proof.script}: {', '.join(counts)} ({_trial_summary(proof)})",
        "",
        render(_shown_findings(proof), width=width, colour=colour),
        "",
        f"report: {folder / 'report.html'}",
    ]
    return "\n".join(lines)


def _shown_findings(proof: Proof) -> list[Finding]:
    """Return the findings; a difference that several stops show appears once."""
    shown: dict[str, Finding] = {}
    for result in proof.results:
        finding = result.finding
        first = shown.get(finding.name) if result.difference is not None else None
        if first is None:
            shown[finding.name if result.difference is not None else result.name] = finding
        else:
            text = "\n".join(part for part in (first.evidence, f"also: {finding.what}") if part)
            shown[finding.name] = replace(first, evidence=text)
    return list(shown.values())


def _trial_summary(proof: Proof) -> str:
    request = proof.request
    steps = proof.baseline.steps if proof.baseline else 0
    where = "on the CPU" if request.device == "cpu" else "on GPUs"
    ranks = plural(request.ranks, "rank")
    runs = plural(proof.runs, "run")
    return f"{ranks} {where}, {steps} steps, {runs} in {format_seconds(proof.took_s)}"


def proof_json(proof: Proof, folder: Path) -> dict[str, object]:
    """Return the result as plain JSON types."""
    return {
        "script": proof.script,
        "ranks": proof.request.ranks,
        "steps": proof.baseline.steps if proof.baseline else 0,
        "runs": proof.runs,
        "passed": not proof.failed,
        "report": str(folder / "report.html"),
        "results": [_result_json(result) for result in proof.results],
    }


def _result_json(result: Result) -> dict[str, object]:
    found = result.difference
    return {
        "name": result.name,
        "property": result.property,
        "outcome": result.outcome,
        "difference": None
        if found is None
        else {
            "kind": found.kind,
            "step": found.step,
            "rank": found.rank,
            "also": list(found.also),
            "line": found.line or None,
        },
        "finding": result.finding.as_json(),
    }


def proof_junit(proof: Proof) -> str:
    """Return the result as JUnit XML, which CI servers show: one test case for each check."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"muster prove {proof.script}",
        tests=str(len(proof.results)),
        failures=str(sum(result.finding.status is Status.FAILURE for result in proof.results)),
        time=f"{proof.took_s:.1f}",
    )
    for result in proof.results:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"prove.{result.property}", name=result.name
        )
        finding = result.finding
        if finding.status is Status.FAILURE:
            failure = ElementTree.SubElement(
                case, "failure", type=finding.name, message=_clean(finding.what)
            )
            failure.text = _clean(f"why: {finding.why}\nfix: {finding.fix}")
        elif result.outcome == "not tested":
            ElementTree.SubElement(case, "skipped", message=_clean(finding.what))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _clean(text: str) -> str:
    """Remove characters that XML does not allow."""
    return "".join(one for one in text if one in "\n\t" or ord(one) >= 32)


def proof_page(proof: Proof) -> str:
    """Return the result as a page with the curves of all runs over each other."""
    request = proof.request
    parts = [
        f"<h1>muster prove {escape(proof.script)}</h1>",
        f"<p>{escape(_trial_summary(proof))}: <code>{escape(printable(request.command))}</code></p>",
        html_table(
            ("check", "result", "first difference", "in step"),
            [_table_row(result) for result in proof.results],
        ),
        *(html_article(one) for one in _shown_findings(proof)),
    ]
    if proof.baseline is not None and proof.baseline.steps:
        for name, title in _CURVES.items():
            curves = list(_proof_curves(proof, name))
            if curves:
                chart = line_chart(
                    title, Axis(title="step", from_zero=False), Axis(title=title), curves
                )
                parts.append(f"<figure>{chart}</figure>")
    parts.append(
        f"<p>Repeat: <code>{escape(shlex.join(['muster', 'prove', *request.command]))}</code></p>"
    )
    return html_page(f"muster prove {proof.script}", parts, style=RULES)


def _table_row(result: Result) -> tuple[str, str, str, str]:
    found = result.difference
    kind, step = (found.kind, str(found.step)) if found is not None else ("", "")
    return result.name, result.outcome, kind, step


def _proof_curves(proof: Proof, name: str) -> Iterator[Curve]:
    baseline = proof.baseline
    assert baseline is not None
    yield from _curve("undisturbed", baseline, name, 0)
    if proof.repeated is not None:
        yield from _curve("repeated", proof.repeated, name, 0, dashed=True)
    for trial in proof.resumed:
        if trial.resumed.steps:
            expected = max((save.step for save in trial.stopped.saves), default=0)
            start = resumed_from(baseline, trial.resumed, expected)
            begin = expected if start is None else start
            yield from _curve(f"resumed: {trial.name}", trial.resumed, name, begin, dashed=True)


def _curve(
    title: str, record: TrialRecord, name: str, start: int, *, dashed: bool = False
) -> Iterator[Curve]:
    points = [
        (float(start + step + 1), value)
        for step in range(record.steps)
        if (value := _value(record, name, step)) is not None
    ]
    if points:
        yield Curve(name=title, points=points, dashed=dashed)


def _value(record: TrialRecord, name: str, step: int) -> float | None:
    if name == "loss":
        return record.loss(step)
    if name == "gradient_norm":
        return record.gradient_norm(step)
    return next(iter(record.ranks[0].steps[step].learning_rates), None)
