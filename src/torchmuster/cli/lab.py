"""``muster lab``: start a lab, grade it, and write its report."""

import sys
from dataclasses import dataclass
from pathlib import Path

from torchmuster.cli import output
from torchmuster.cli.options import Command, argument, command, flag
from torchmuster.errors import ExitCode
from torchmuster.labs import grading, report, workspace
from torchmuster.labs.lesson import NAMES, TO_PASS, lesson
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
class StartedOptions(LabsOptions):
    """The flags of ``muster lab check`` and ``muster lab report``."""

    name: str | None = argument(
        "name of a lab (default: that of the current folder)", metavar="NAME"
    )


@command(LabsOptions, summary="show the labs and your points")
def list_labs(options: LabsOptions) -> int:
    """Print the labs and the learner's points."""
    rows, total = [], 0
    for number, name in enumerate(NAMES, 1):
        lab = workspace.LabFolder(lesson(name), options.labs / name)
        grade, points = lab.grade(), 0
        if grade is not None:
            points = grade.points
        if lab.lesson.counts:
            total += points
        rows.append((str(number), name, f"{points}/{lab.lesson.points}", lab.lesson.title))
    output.print_table(rows)
    verdict = "passed" if total >= TO_PASS else f"{TO_PASS} to pass"
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
    content = lesson(options.name)
    if options.solution:
        output.print_text(content.solution(), end="")
        return ExitCode.GOOD
    lab = workspace.start_lab(content, options.labs)
    count = len(content.exercises)
    output.print_text(f"read     {lab.path / 'README.md'}")
    output.print_text(f"fill in  {lab.file}: {count} exercises, {content.points} points")
    output.print_text(f"then     muster lab check {content.name}")
    return ExitCode.GOOD


@command(
    StartedOptions,
    summary="grade a lab by running its tests",
    more="""
    The tests are those of `pytest tests/`. They run on the CPU, on two ranks if needed.
    The exit code is 1 until all points are reached. The result is also in the lab's grade.json.
    """,
    examples=["muster lab check ddp"],
)
def check(options: StartedOptions) -> int:
    """Grade a lab and explain each mistake."""
    lab = workspace.find_lab(options.name, options.labs)
    content = lab.lesson
    names = [exercise.name for exercise in content.exercises]
    verdicts = grading.grade(content, lab.file, names)
    points = grading.points(content, verdicts)
    lab.save_grade(workspace.Grade(points=points, verdicts=verdicts))
    findings = [grading.mistake_finding(content, verdict) for verdict in verdicts]
    output.show_findings(findings, sys.stdout)
    output.print_text(f"{content.name}: {points} of {content.points} points")
    return ExitCode.GOOD if points == content.points else ExitCode.FAILED


@command(
    StartedOptions,
    summary="write a lab's report",
    more="""
    The report has your points, your mistakes, your answers from answers.md,
    and links to the plots (.png, .svg) in the lab's folder.
    """,
    examples=["muster lab report ddp"],
)
def write_report(options: StartedOptions) -> int:
    """Write the report of a lab."""
    lab = workspace.find_lab(options.name, options.labs)
    page = lab.path / "report.html"
    write_atomically(page, report.lab_page(lab))
    output.print_text(f"report: {page}")
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
