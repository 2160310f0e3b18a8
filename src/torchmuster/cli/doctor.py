"""``muster doctor``: check this machine for problems that would affect a run."""

import itertools
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmuster import __version__
from torchmuster.cli import output
from torchmuster.cli.options import JsonOptions, command, flag, names
from torchmuster.diagnose.machine.all_checks import SUBJECTS
from torchmuster.errors import ExitCode
from torchmuster.finding import Finding, Status, exit_code, render, worst_first
from torchmuster.units import plural


def subjects(text: str) -> tuple[str, ...]:
    """Parse a comma list of subjects."""
    chosen = names(text)
    unknown = [name for name in chosen if name not in SUBJECTS]
    if unknown or not chosen:
        raise ValueError(f"{text!r} is not a list of subjects; muster doctor --all shows them")
    return chosen


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(JsonOptions):
    """The flags of ``muster doctor``."""

    all: bool = flag("list every subject and note in full", default=False)
    only: tuple[str, ...] = flag(
        "check only these subjects: torch,names (--all shows them)",
        default=(),
        parse=subjects,
        metavar="SUBJECTS",
    )
    explain: str | None = flag("explain an error text instead (-: read from stdin)", metavar="TEXT")


@command(
    DoctorOptions,
    examples=[
        "muster doctor                      check everything, in a second or two",
        "muster doctor --all                also list what is well, and the notes in full",
        "muster doctor --only torch,names   check only these subjects",
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
    from torchmuster.diagnose.check import Check, Surroundings
    from torchmuster.diagnose.host_checks import run_checks
    from torchmuster.diagnose.machine.all_checks import by_subject

    began = time.monotonic()
    subject_of: dict[str, str] = {}
    chosen: list[Check] = []
    for subject, checks in by_subject(options.only).items():
        subject_of |= {check.name: subject for check in checks}
        chosen += checks
    examined = run_checks(Surroundings(), chosen)
    seconds = time.monotonic() - began
    findings: dict[str, list[Finding]] = {}
    for result in examined:
        findings.setdefault(subject_of[result.check.name], []).extend(result.findings)
    if options.json:
        _print_json(findings, seconds)
    else:
        _show_doctor(findings, seconds, everything=options.all)
    return exit_code(itertools.chain.from_iterable(findings.values()))


def _print_json(findings: dict[str, list[Finding]], seconds: float) -> None:
    described = []
    for subject, some in findings.items():
        described += [{"subject": subject, **finding.as_json()} for finding in worst_first(some)]
    output.print_json(
        {
            "torchmuster": __version__,
            "seconds": round(seconds, 3),
            "subjects": {subject: _worst(some).value for subject, some in findings.items()},
            "findings": described,
        }
    )


def _worst(findings: Sequence[Finding]) -> Status:
    return worst_first(findings)[0].status if findings else Status.OK


def _show_doctor(
    findings: dict[str, list[Finding]], seconds: float, *, everything: bool = False
) -> None:
    """Print the problems in full and each note in one line; with ``everything``, all of it."""
    if everything:
        _print_subjects(findings)
    problems, notes = [], []
    for finding in itertools.chain.from_iterable(findings.values()):
        if finding.status in (Status.FAILURE, Status.WARNING):
            problems.append(finding)
        elif finding.status is Status.NOTE:
            notes.append(finding if everything else replace(finding, why="", fix="", evidence=""))
    shown = [*problems, *notes]
    if shown:
        output.show_findings(shown, sys.stdout)
        output.print_text()
    well = sum(_worst(some) is Status.OK for some in findings.values())
    verdict = f"{_verdict(shown)}; {well} of {len(findings)} subjects ok"
    more = "" if everything else " (--all lists them)"
    output.print_text(f"{verdict}{more}, in {seconds:.1f} s")


def _print_subjects(findings: dict[str, list[Finding]]) -> None:
    """Print a line for each subject, shortened on a terminal: how many findings, and what was found."""
    colour = output.wants_colour(sys.stdout)
    room = max(shutil.get_terminal_size().columns - 9, 40) if sys.stdout.isatty() else None
    for subject, some in findings.items():
        seen = [finding.what for finding in some if finding.status is Status.OK and finding.what]
        summary = "; ".join([*_counts(some), *seen]) or "nothing to check"
        line = f"{subject:<22}{summary}"
        if room is not None and len(line) > room:
            line = f"{line[: room - 1].rstrip()}…"
        finding = Finding(name=subject, status=_worst(some), what=line)
        output.print_coloured(render([finding], colour=colour))
    output.print_text()


def _counts(findings: Sequence[Finding]) -> list[str]:
    counts = []
    for status in (Status.FAILURE, Status.WARNING, Status.NOTE):
        count = sum(finding.status is status for finding in findings)
        if count:
            counts.append(plural(count, status.value))
    return counts


def _verdict(shown: Sequence[Finding]) -> str:
    counts = ", ".join(_counts(shown))
    match _worst(shown):
        case Status.FAILURE:
            return f"not ready for a run: {counts}"
        case Status.WARNING:
            return f"ready for a run, with {counts}"
        case Status.NOTE:
            return f"ready for a run ({counts})"
        case _:
            return "ready for a run: no problems found"
