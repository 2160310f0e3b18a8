"""``muster doctor``: check this machine for problems that would affect a run."""

import sys
import time
from dataclasses import dataclass, replace

from torchmuster import __version__
from torchmuster.cli import output
from torchmuster.cli.options import JsonOptions, command, flag
from torchmuster.errors import ExitCode
from torchmuster.finding import Finding, Status, exit_code, worst_first
from torchmuster.units import plural

_VERDICTS = {
    Status.OK: "ready for a run",
    Status.NOTE: "ready for a run",
    Status.WARNING: "ready for a run, with warnings",
    Status.FAILURE: "not ready for a run",
}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(JsonOptions):
    """The flags of ``muster doctor``."""

    all: bool = flag("also show what is well, and the notes in full", default=False)
    explain: str | None = flag("explain an error text instead (-: read from stdin)", metavar="TEXT")


@command(
    DoctorOptions,
    examples=[
        "muster doctor                      check everything, in a second or two",
        "muster doctor --all                also show what is well, and the notes in full",
        "muster doctor --json > today.json  as JSON; the exit code is 1 if a check fails",
        "muster doctor --explain - < error.log   explain an error and how to fix it",
    ],
)
def run(options: DoctorOptions) -> int:
    """Check this machine, or explain a text; return the exit code of the findings."""
    if options.explain is not None:
        return _explain(options.explain, as_json=options.json)
    return _examine(options)


def _explain(text: str, *, as_json: bool) -> ExitCode:
    from torchmuster.known_errors.explain import explanations_as_findings

    findings = explanations_as_findings(sys.stdin.read() if text == "-" else text)
    if as_json:
        output.print_json({"findings": [finding.as_json() for finding in findings]})
    else:
        output.show_findings(findings, sys.stdout)
    return exit_code(findings)


def _examine(options: DoctorOptions) -> ExitCode:
    from torchmuster.diagnose.check import Surroundings
    from torchmuster.diagnose.host_checks import run_checks
    from torchmuster.diagnose.machine import all_checks

    began_s = time.monotonic()
    findings = run_checks(Surroundings(), all_checks.load())
    seconds = time.monotonic() - began_s
    if options.json:
        output.print_json(
            {
                "torchmuster": __version__,
                "seconds": round(seconds, 3),
                "findings": [finding.as_json() for finding in worst_first(findings)],
            }
        )
    else:
        _show_doctor(findings, seconds, everything=options.all)
    return exit_code(findings)


def _show_doctor(findings: list[Finding], seconds: float, *, everything: bool) -> None:
    """Print the problems in full and each note in one line; with ``everything``, all of it."""
    shown = []
    for finding in findings:
        if everything or finding.status in (Status.WARNING, Status.FAILURE):
            shown.append(finding)
        elif finding.status is Status.NOTE:
            shown.append(replace(finding, why="", fix="", evidence=""))
    if shown:
        output.show_findings(shown, sys.stdout)
        output.print_text()
    well = sum(finding.status is Status.OK for finding in findings)
    verdict = _VERDICTS[worst_first(findings)[0].status]
    more = "" if everything else " (--all shows them)"
    output.print_text(f"{verdict}; {plural(well, 'check')} found nothing{more}, in {seconds:.1f} s")
