"""``muster explain``: report what happened to a run, the root cause, and how to fix it."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.cli import output
from torchmuster.cli.options import JsonOptions, WhichRunOptions, argument, command
from torchmuster.cli.runs import run_facts
from torchmuster.cli.which_run import choose_run
from torchmuster.errors import ExitCode

if TYPE_CHECKING:
    from torchmuster.launch.history.failure_report import FailureReport

_FILES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(WhichRunOptions, JsonOptions):
    """The flags of ``muster explain``."""

    which: str | None = argument(
        "a run's id, a unique part of it, its folder, or: last (default: the newest)",
        metavar="RUN",
    )


@command(
    ExplainOptions,
    more="""
    Needs only the run folder: the run may be active, finished, or copied from another machine.
    To explain an error text alone: muster doctor --explain.
    """,
    examples=[
        "muster explain                     the newest run in ./runs",
        "muster explain 20260131-1200       a unique part of the run's id",
        "muster explain /mnt/copied/20260131-120000-train-1a2b",
    ],
)
def run(options: ExplainOptions) -> int:
    """Print what happened to the run."""
    from torchmuster.launch.history.failure_report import failure_report_of

    report = failure_report_of(choose_run(options.which, options.runs))
    if options.json:
        moments = [{"at_unix_s": at, "what": what} for at, what in report.record.timeline()]
        findings = [finding.as_json() for finding in report.findings]
        facts = run_facts(report.record.run)
        output.print_json({**facts, "moments": moments, "findings": findings})
    else:
        _show_report(report)
    return ExitCode.GOOD


def _show_report(report: "FailureReport") -> None:
    from torchmuster.launch.history.run_record import timeline_text

    run, timeline = report.record.run, report.record.timeline()
    output.print_text(f"run {run.id}\n")
    for line in timeline_text(timeline):
        output.print_text(f"  {line}")
    if timeline:
        output.print_text()
    output.show_findings(list(report.findings), sys.stdout)
    if not report.files:
        return
    output.print_text(f"\nin {run.path}:")
    for name in report.files[:_FILES_SHOWN]:
        output.print_text(f"  {name}")
    if len(report.files) > _FILES_SHOWN:
        output.print_text(f"  … and {len(report.files) - _FILES_SHOWN} more")
