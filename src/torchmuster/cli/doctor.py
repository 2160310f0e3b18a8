"""``muster doctor``: check this machine for problems that would affect a run."""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from torchmuster import __version__
from torchmuster.cli import output, parsers
from torchmuster.diagnose.machine.all_checks import SUBJECTS
from torchmuster.errors import ExitCode
from torchmuster.finding import Finding, Status, exit_code, render, worst_first
from torchmuster.units import plural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster doctor``."""
    parsers.show_examples(
        parser,
        [
            "muster doctor                      check everything, in a second or two",
            "muster doctor --deep               also run torch on each device",
            "muster doctor --all                also list what is well, and the notes in full",
            "muster doctor --only torch names   check only these subjects",
            "muster doctor --json > today.json  as JSON; the exit code is 1 if a check fails",
            "muster doctor --explain - < error.log   explain an error and how to fix it",
        ],
    )
    parser.add_argument("--deep", action="store_true", help="also run checks that take seconds")
    parser.add_argument("--all", action="store_true", help="list every subject and note in full")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SUBJECTS),
        default=(),
        metavar="SUBJECT",
        help="check only these subjects (--list shows them)",
    )
    parser.add_argument(
        "--explain", metavar="TEXT", help="explain an error text instead (-: read from stdin)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--list", action="store_true", help="list the checks without running them")
    parsers.add_json_flag(how)
    parser.set_defaults(run=_run_doctor)


def _run_doctor(options: argparse.Namespace) -> ExitCode:
    if options.explain is not None:
        return _explain(options)
    return _list(options.only) if options.list else _examine(options)


def _explain(options: argparse.Namespace) -> ExitCode:
    from torchmuster.known_errors.explain import explanations_as_findings

    findings = explanations_as_findings(
        sys.stdin.read() if options.explain == "-" else options.explain
    )
    if options.json:
        output.print_json({"findings": [one.as_json() for one in findings]})
    else:
        output.show_findings(findings, sys.stdout)
    return exit_code(findings)


def _list(only: Sequence[str]) -> ExitCode:
    from torchmuster.diagnose.check import Cost
    from torchmuster.diagnose.host_checks import chosen_of
    from torchmuster.diagnose.machine.all_checks import by_subject

    for subject, checks in by_subject(only).items():
        title = subject
        for check in chosen_of(checks, sys.platform, Cost.SECONDS):
            deep = "  (--deep)" if check.cost > Cost.INSTANT else ""
            output.print_text(f"{title:<22}{check.asks}{deep}")
            title = ""
    return ExitCode.GOOD


def _examine(options: argparse.Namespace) -> ExitCode:
    from torchmuster.diagnose.check import Check, Cost, Surroundings
    from torchmuster.diagnose.host_checks import run_checks
    from torchmuster.diagnose.machine.all_checks import by_subject

    def still_waiting(checks: Sequence[Check]) -> None:
        names = ", ".join(check.name for check in checks)
        output.say(f"still waiting for {names} …")

    began = time.monotonic()
    subjects = by_subject(options.only)
    subject_of = {check.name: name for name, checks in subjects.items() for check in checks}
    examined = run_checks(
        Surroundings(),
        [check for checks in subjects.values() for check in checks],
        at_most=Cost.SECONDS if options.deep else Cost.INSTANT,
        on_silence=still_waiting,
    )
    seconds = time.monotonic() - began
    findings: dict[str, list[Finding]] = {}
    for one in examined:
        findings.setdefault(subject_of[one.check.name], []).extend(one.findings)
    if options.json:
        _print_json(findings, seconds)
    else:
        _show_doctor(findings, seconds, everything=options.all)
    return exit_code(finding for some in findings.values() for finding in some)


# ---- as JSON


def _print_json(findings: dict[str, list[Finding]], seconds: float) -> None:
    output.print_json(
        {
            "torchmuster": __version__,
            "seconds": round(seconds, 3),
            "subjects": {subject: _worst(some).value for subject, some in findings.items()},
            "findings": [
                {"subject": subject, **finding.as_json()}
                for subject, some in findings.items()
                for finding in worst_first(some)
            ],
        }
    )


def _worst(findings: Sequence[Finding]) -> Status:
    return worst_first(findings)[0].status if findings else Status.OK


# ---- as text


def _show_doctor(
    findings: dict[str, list[Finding]], seconds: float, *, everything: bool = False
) -> None:
    """Print the problems in full and each note in one line; with ``everything``, all of it."""
    if everything:
        _print_subjects(findings)
    problems, notes = [], []
    for finding in (one for some in findings.values() for one in some):
        if finding.status in (Status.FAILURE, Status.WARNING):
            problems.append(finding)
        elif finding.status is Status.NOTE:
            notes.append(finding)
    shown = [*problems, *notes]
    if not everything:
        shown = [*problems, *(replace(note, why="", fix="", evidence="") for note in notes)]
    if shown:
        output.show_findings(shown, sys.stdout)
        output.print_text()
    well = sum(_worst(some) is Status.OK for some in findings.values())
    verdict = f"{_doctor_verdict(shown)}; {well} of {len(findings)} subjects ok"
    more = "" if everything else " (--all lists them)"
    output.print_text(f"{verdict}{more}, in {seconds:.1f} s")


def _print_subjects(findings: dict[str, list[Finding]]) -> None:
    colour = output.wants_colour(sys.stdout)
    # Shortened to one line on a terminal; complete in a pipe or a file.
    room = max(shutil.get_terminal_size().columns - 9, 40) if sys.stdout.isatty() else None
    for subject, some in findings.items():
        line = _shortened(f"{subject:<22}{_doctor_text(some)}", room)
        seen = Finding(name=subject, status=_worst(some), what=line)
        output.print_coloured(render([seen], colour=colour))
    output.print_text()


def _doctor_text(findings: Sequence[Finding]) -> str:
    """Return a summary of a subject: the number of findings, if any, and what was found."""
    seen = [one.what for one in findings if one.status is Status.OK and one.what]
    return "; ".join([*_counts(findings), *seen]) or "nothing to check"


def _counts(findings: Sequence[Finding]) -> list[str]:
    counted = []
    for status in (Status.FAILURE, Status.WARNING, Status.NOTE):
        count = sum(one.status is status for one in findings)
        if count:
            counted.append(plural(count, status.value))
    return counted


def _shortened(text: str, room: int | None) -> str:
    return text if room is None or len(text) <= room else f"{text[: room - 1].rstrip()}…"


def _doctor_verdict(told: Sequence[Finding]) -> str:
    counts = ", ".join(_counts(told))
    match worst_first(told)[0].status if told else Status.OK:
        case Status.FAILURE:
            return f"not ready for a run: {counts}"
        case Status.WARNING:
            return f"ready for a run, with {counts}"
        case Status.NOTE:
            return f"ready for a run ({counts})"
        case _:
            return "ready for a run: no problems found"
