"""``muster lab``: start a lab, grade it, and write its report."""

import argparse
import sys
from pathlib import Path
from typing import Any

from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode
from torchmuster.labs import grading, report, workspace
from torchmuster.labs import lesson as labs
from torchmuster.labs.workspace import Workspace
from torchmuster.runfolder import write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``muster lab``."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    _add_list(actions)
    _add_start(actions)
    _add_check(actions)
    _add_report(actions)
    parsers.show_examples(
        parser,
        [
            "muster lab list            show the labs and your progress",
            "muster lab start ddp       copy a lab into labs/ddp",
            "muster lab check ddp       run its tests, and explain each mistake",
            "muster lab report ddp      write a report",
        ],
    )


def _add_list(actions: Any) -> None:
    parser = parsers.add_action(actions, "list", "show the labs and your points")
    _add_labs_flag(parser)
    parsers.add_json_flag(parser)
    parser.set_defaults(run=_list)


def _add_start(actions: Any) -> None:
    parser = parsers.add_action(
        actions,
        "start",
        "copy a lab into your folder",
        more="A lab has a README, a file with gaps to fill, tests, and questions for the report.",
        examples=["muster lab start ddp", "muster lab start ddp --solution    print the solution"],
    )
    parser.add_argument("name", metavar="NAME", help="a lab's name, from muster lab list")
    parser.add_argument(
        "--solution", action="store_true", help="print the reference solution instead"
    )
    _add_labs_flag(parser)
    parser.set_defaults(run=_start)


def _add_check(actions: Any) -> None:
    parser = parsers.add_action(
        actions,
        "check",
        "grade a lab by running its tests",
        more="The tests are those of `pytest tests/`. They run on the CPU, on two ranks if needed.\n"
        "The exit code is 1 until all points are reached.",
        examples=["muster lab check", "muster lab check ddp --only train_epoch"],
    )
    _add_name_argument(parser)
    parser.add_argument(
        "--only", metavar="EXERCISE", help="grade only this exercise, without saving the grade"
    )
    parsers.add_json_flag(parser)
    parser.set_defaults(run=_check)


def _add_report(actions: Any) -> None:
    parser = parsers.add_action(
        actions,
        "report",
        "write a lab's report",
        more="The report has your points, your mistakes, your answers from answers.md,\n"
        "and links to the plots (.png, .svg) in the lab's folder.",
        examples=["muster lab report ddp"],
    )
    _add_name_argument(parser)
    parser.set_defaults(run=_report)


def _add_name_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="name of a lab (default: the one you changed last)"
    )
    _add_labs_flag(parser)


def _add_labs_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--labs",
        type=Path,
        default=workspace.DEFAULT_ROOT,
        metavar="DIR",
        help="folder that contains your labs (default: labs)",
    )


def _list(options: argparse.Namespace) -> int:
    workspaces = workspace.all_workspaces(options.labs)
    if options.json:
        output.print_json([_as_json(lab) for lab in workspaces])
        return ExitCode.GOOD
    counted = []
    for number, lab in enumerate(workspaces, 1):
        points = f"{_points(lab)}/{lab.lesson.points}"
        title = lab.lesson.content.title
        output.print_text(f"{number}  {lab.lesson.name:<16} {points:>6}  {_state(lab):<12} {title}")
        if lab.lesson.content.counts:
            counted.append(lab)
    total = sum(_points(lab) for lab in counted)
    verdict = f"{labs.TO_PASS} to pass"
    if total >= labs.TO_PASS:
        verdict = "passed"
    first, last = counted[0].lesson.name, counted[-1].lesson.name
    output.print_text(f"{total} of 100 points in {first} to {last}; {verdict}")
    return ExitCode.GOOD


def _as_json(lab: Workspace) -> dict[str, object]:
    return {
        "name": lab.lesson.name,
        "title": lab.lesson.content.title,
        "points": _points(lab),
        "of": lab.lesson.points,
        "counts": lab.lesson.content.counts,
        "state": _state(lab),
        "folder": str(lab.folder),
    }


def _points(lab: Workspace) -> int:
    grade = lab.grade()
    if grade is None:
        return 0
    return grade.points


def _state(lab: Workspace) -> str:
    if not lab.file.is_file():
        return "not started"
    grade = lab.grade()
    if grade is None:
        return "not checked"
    if grade.of != lab.fingerprint():
        return "changed"
    if grade.points == lab.lesson.points:
        return "done"
    return "checked"


def _start(options: argparse.Namespace) -> int:
    lesson = labs.lesson(options.name)
    if options.solution:
        output.print_text(lesson.solution(), end="")
        return ExitCode.GOOD
    started = workspace.start_workspace(lesson, options.labs)
    count = len(lesson.content.exercises)
    output.print_text(f"read     {started.folder / 'README.md'}")
    output.print_text(f"fill in  {started.file}: {count} exercises, {lesson.points} points")
    output.print_text(f"then     muster lab check {lesson.name}")
    return ExitCode.GOOD


def _check(options: argparse.Namespace) -> int:
    lab = workspace.find_workspace(options.name, options.labs)
    lesson = lab.lesson
    exercises = lesson.content.exercises
    if options.only is not None:
        exercises = (lesson.exercise(options.only),)
    fingerprint = lab.fingerprint()
    names = [exercise.name for exercise in exercises]
    verdicts = grading.grade(lesson, lab.file, names, say=output.say)
    points = grading.points(lesson, verdicts)
    possible = sum(exercise.points for exercise in exercises)
    if options.only is None:
        lab.keep(workspace.Grade(of=fingerprint, points=points, verdicts=verdicts))
    findings = [grading.mistake_finding(lesson, verdict) for verdict in verdicts]
    if options.json:
        found = [finding.as_json() for finding in findings]
        output.print_json({"lab": lesson.name, "points": points, "of": possible, "findings": found})
    else:
        output.show_findings(findings, sys.stdout)
        output.print_text(f"{lesson.name}: {points} of {possible} points")
    if points < possible:
        return ExitCode.FAILED
    return ExitCode.GOOD


def _report(options: argparse.Namespace) -> int:
    lab = workspace.find_workspace(options.name, options.labs)
    write_atomically(lab.report, report.lab_page(lab))
    output.print_text(f"report: {lab.report}")
    left = [question for question, answer in lab.answers() if not answer]
    if left:
        answers = lab.folder / "answers.md"
        output.print_text(f"{len(left)} questions left: answer them in {answers}, then rerun")
    return ExitCode.GOOD
