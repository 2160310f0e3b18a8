"""``muster lab list`` and ``start``, and what all of its actions refuse; no torch."""

from pathlib import Path

import pytest

from muster_command import Muster
from torchmuster.labs import lesson, workspace
from torchmuster.labs.workspace import Grade


def _reached(root: Path, name: str, points: int) -> None:
    lab = workspace.start_lab(lesson.lesson(name), root)
    lab.save_grade(Grade(points=points, verdicts=()))


def test_the_list_shows_points_and_the_last_line_whether_the_course_is_passed(
    muster: Muster, own_machine: Path
) -> None:
    root = own_machine / "labs"
    _reached(root, "ddp", 20)  # does not count
    _reached(root, "gpu-basics", 20)
    _reached(root, "distributed", 25)
    workspace.start_lab(lesson.lesson("memory"), root)
    done = muster("lab", "list")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[2].split() == ["3", "gpu-basics", "20/20", "GPU", "basics", "and", "profiling"]
    assert lines[5].split()[:3] == ["6", "memory", "0/20"]
    assert lines[-1] == "45 of 100 points in gpu-basics to pipeline; 70 to pass"
    _reached(root, "mixed-precision", 15)
    _reached(root, "pipeline", 10)
    last = muster("lab", "list").out.splitlines()[-1]
    assert last == "70 of 100 points in gpu-basics to pipeline; passed"


def test_a_lab_is_started_in_a_folder_of_ones_choice(muster: Muster, own_machine: Path) -> None:
    done = muster("lab", "start", "ddp", "--labs", "course")
    assert done.code == 0
    for fact in ("course/ddp/README.md", "course/ddp/ddp.py", "20 points", "muster lab check ddp"):
        assert fact in done.out
    starter = lesson.lesson("ddp").solution(gaps=True)
    assert (own_machine / "course" / "ddp" / "ddp.py").read_text() == starter
    assert muster("lab", "start", "ddp", "--labs", "course").code == 2


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (("start", "dpp"), "unknown lab 'dpp'"),
        (("check",), "no lab is named"),
        (("report",), "no lab is named"),
        (("check", "ddp"), "muster lab start ddp"),
    ],
)
def test_what_cannot_be_is_refused(
    muster: Muster, own_machine: Path, arguments: tuple[str, ...], fact: str
) -> None:
    refused = muster("lab", *arguments)
    assert refused.code == 2
    assert fact in refused.err
