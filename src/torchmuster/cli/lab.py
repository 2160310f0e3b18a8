"""``muster lab``: start a lab, grade it, and write its report."""

import sys
from dataclasses import dataclass
from pathlib import Path

from torchmuster.cli import output
from torchmuster.cli.options import Command, argument, command, flag
from torchmuster.errors import ExitCode
from torchmuster.labs import grading, report, workspace
from torchmuster.labs import lesson as labs
from torchmuster.runfolder import write_atomically


@dataclass(frozen=True, kw_only=True)
class LabsOptions:
    """The folder of the labs."""

    labs: Path = flag(
        "folder that contains your labs (default: labs)",
        default=workspace.DEFAULT_ROOT,
        parse=Path,
        metavar="DIR",
    )


@dataclass(frozen=True, kw_only=True)
class StartOptions(LabsOptions):
    """The flags of ``muster lab start``."""

    name: str = argument("a lab's name, from muster lab list", required=True, metavar="NAME")
    solution: bool = flag("print the reference solution instead", default=False)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(LabsOptions):
    """The flags of ``muster lab report``."""

    name: str | None = argument("name of a lab (default: the one you changed last)", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class CheckOptions(ReportOptions):
    """The flags of ``muster lab check``."""

    only: str | None = flag(
        "grade only this exercise, without saving the grade", metavar="EXERCISE"
    )


@command(LabsOptions, summary="show the labs and your points")
def list_labs(options: LabsOptions) -> int:
    """Print the labs and the learner's points."""
    rows, total = [], 0
    for number, lab in enumerate(workspace.all_workspaces(options.labs), 1):
        grade, lesson = lab.grade(), lab.lesson
        points, state = 0, "not checked"
        if not lab.file.is_file():
            state = "not started"
        elif grade is not None:
            points, state = grade.points, "checked"
            if lab.is_changed:
                state = "changed"
            elif points == lesson.points:
                state = "done"
        if lesson.content.counts:
            total += points
        reached = f"{points}/{lesson.points}"
        rows.append((str(number), lesson.name, reached, state, lesson.content.title))
    output.print_table(rows)
    verdict = "passed" if total >= labs.TO_PASS else f"{labs.TO_PASS} to pass"
    output.print_text(f"{total} of 100 points in gpu-basics to pipeline; {verdict}")
    return ExitCode.GOOD


@command(
    StartOptions,
    summary="copy a lab into your folder",
    more="A lab has a README, a file with gaps to fill, tests, and questions for the report.",
    examples=["muster lab start ddp", "muster lab start ddp --solution    print the solution"],
)
def start(options: StartOptions) -> int:
    """Copy a lab, or print its solution."""
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


@command(
    CheckOptions,
    summary="grade a lab by running its tests",
    more="""
    The tests are those of `pytest tests/`. They run on the CPU, on two ranks if needed.
    The exit code is 1 until all points are reached. The result is also in the lab's grade.json.
    """,
    examples=["muster lab check", "muster lab check ddp --only train_epoch"],
)
def check(options: CheckOptions) -> int:
    """Grade a lab and explain each mistake."""
    lab = workspace.find_workspace(options.name, options.labs)
    lesson = lab.lesson
    exercises = lesson.content.exercises
    if options.only is not None:
        exercises = (lesson.exercise(options.only),)
    names = [exercise.name for exercise in exercises]
    verdicts = grading.grade(lesson, lab.file, names)
    points = grading.points(lesson, verdicts)
    possible = sum(exercise.points for exercise in exercises)
    if options.only is None:
        lab.keep(workspace.Grade(points=points, verdicts=verdicts))
    findings = [grading.mistake_finding(lesson, verdict) for verdict in verdicts]
    output.show_findings(findings, sys.stdout)
    output.print_text(f"{lesson.name}: {points} of {possible} points")
    return ExitCode.GOOD if points == possible else ExitCode.FAILED


@command(
    ReportOptions,
    summary="write a lab's report",
    more="""
    The report has your points, your mistakes, your answers from answers.md,
    and links to the plots (.png, .svg) in the lab's folder.
    """,
    examples=["muster lab report ddp"],
)
def write_report(options: ReportOptions) -> int:
    """Write the report of a lab."""
    lab = workspace.find_workspace(options.name, options.labs)
    write_atomically(lab.report, report.lab_page(lab))
    output.print_text(f"report: {lab.report}")
    left = [question for question, answer in lab.answers() if not answer]
    if left:
        answers = lab.folder / "answers.md"
        output.print_text(f"{len(left)} questions left: answer them in {answers}, then rerun")
    return ExitCode.GOOD


run = Command(
    examples=[
        "muster lab list            show the labs and your progress",
        "muster lab start ddp       copy a lab into labs/ddp",
        "muster lab check ddp       run its tests, and explain each mistake",
        "muster lab report ddp      write a report",
    ],
    actions={"list": list_labs, "start": start, "check": check, "report": write_report},
)
