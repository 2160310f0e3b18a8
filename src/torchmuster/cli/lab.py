"""``muster lab``: start a lab, grade it, and write its report."""

import argparse
import sys
from pathlib import Path
from typing import Any

from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode
from torchmuster.labs import grading, report, workspace
from torchmuster.labs import lesson as course
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
            "muster lab check ddp       grade it, and explain each mistake",
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
        more="A lab has a text to read, a file with gaps to fill, and questions for the report.",
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
        "grade a lab by running its code",
        more="Runs on the CPU, on two ranks if needed. "
        "The exit code is 1 until all points are reached.",
        examples=["muster lab check", "muster lab check ddp --only train_epoch"],
    )
    _add_name_argument(parser)
    parser.add_argument(
        "--only", metavar="EXERCISE", help="grade only this exercise, without saving the grade"
    )
    parsers.add_json_flag(parser)
    parser.set_defaults(run=_check_lab)


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
    desks = workspace.all_workspaces(options.labs)
    if options.json:
        output.print_json([_lab_as_json(one) for one in desks])
        return ExitCode.GOOD
    for place, one in enumerate(desks, 1):
        got = f"{_points(one)}/{one.lesson.points}"
        output.print_text(
            f"{place}  {one.lesson.name:<16} {got:>6}  {_lab_state(one):<12} {one.lesson.title}"
        )
    counted = [one for one in desks if one.lesson.counts]
    total = sum(_points(one) for one in counted)
    first, last = counted[0].lesson.name, counted[-1].lesson.name
    verdict = "passed" if total >= course.TO_PASS else f"{course.TO_PASS} to pass"
    output.print_text(f"{total} of 100 points in {first} to {last}; {verdict}")
    return ExitCode.GOOD


def _lab_as_json(one: Workspace) -> dict[str, object]:
    return {
        "name": one.lesson.name,
        "title": one.lesson.title,
        "points": _points(one),
        "of": one.lesson.points,
        "counts": one.lesson.counts,
        "state": _lab_state(one),
        "folder": str(one.folder),
    }


def _points(one: Workspace) -> int:
    grade = one.grade()
    return grade.points if grade else 0


def _lab_state(one: Workspace) -> str:
    if not one.file.is_file():
        return "not started"
    grade = one.grade()
    if grade is None:
        return "not checked"
    if grade.of != one.fingerprint():
        return "changed"
    return "done" if grade.points == one.lesson.points else "checked"


def _start(options: argparse.Namespace) -> int:
    lesson = course.lesson(options.name)
    if options.solution:
        output.print_text(lesson.solution(), end="")
        return ExitCode.GOOD
    started = workspace.start_workspace(lesson, options.labs)
    output.print_text(f"read     {started.folder / 'reading.md'}")
    output.print_text(
        f"fill in  {started.file}: {len(lesson.exercises)} exercises, {lesson.points} points"
    )
    output.print_text(f"then     muster lab check {lesson.name}")
    return ExitCode.GOOD


def _check_lab(options: argparse.Namespace) -> int:
    at = workspace.find_workspace(options.name, options.labs)
    lesson = at.lesson
    names = tuple(one.name for one in lesson.exercises)
    if options.only is not None:
        names = (lesson.exercise(options.only).name,)
    of = at.fingerprint()
    paper = grading.Paper(file=str(at.file.resolve()), exercises=names)
    (verdicts,) = grading.grade_paper(lesson, [paper], say=output.say)
    got = grading.points(lesson, verdicts)
    if options.only is None:
        at.keep(workspace.Grade(of=of, points=got, verdicts=verdicts))
    findings = [grading.mistake_finding(lesson, one) for one in verdicts]
    possible = sum(lesson.exercise(name).points for name in names)
    if options.json:
        told = [one.as_json() for one in findings]
        output.print_json({"lab": lesson.name, "points": got, "of": possible, "findings": told})
    else:
        output.show_findings(findings, sys.stdout)
        output.print_text(f"{lesson.name}: {got} of {possible} points")
    return ExitCode.GOOD if got == possible else ExitCode.FAILED


def _report(options: argparse.Namespace) -> int:
    at = workspace.find_workspace(options.name, options.labs)
    write_atomically(at.report, report.lab_page(at))
    output.print_text(f"report: {at.report}")
    open_questions = sum(not one for one in at.answers())
    if open_questions:
        output.print_text(
            f"{open_questions} questions left: answer them in {at.folder / 'answers.md'}, then "
            "rerun"
        )
    return ExitCode.GOOD
