"""``muster lab check`` and ``report``, as a learner runs them."""

from pathlib import Path

import pytest

from muster_command import Muster
from torchmuster.labs import lesson as course
from torchmuster.labs import workspace

pytestmark = pytest.mark.ranks


def test_from_a_gap_to_all_points_and_a_report(muster: Muster, own_machine: Path) -> None:
    lesson = course.lesson("communication")
    at = workspace.start_lab(lesson, own_machine / "labs")
    wrong = lesson.solution().replace(
        "return bool(value", "print('sum', value)\n    return bool(1 or value"
    )
    at.file.write_text(wrong, encoding="utf-8")

    first = muster("lab", "check", "communication")
    assert first.code == 1
    assert first.out.startswith(
        "failure  verify_gpu_communication (0 of 4 points): it returns True although nothing was received\n"
    )
    assert "         seen nothing was sent, but it returned True\n" in first.out
    assert "rank 0 printed: sum tensor([3.])" in first.out
    assert "ok       cleanup_distributed (3 of 3 points)\n" in first.out
    assert first.out.endswith("communication: 16 of 20 points\n")
    grade = at.grade()
    assert grade is not None
    assert grade.points == 16

    at.file.write_text(lesson.solution(), encoding="utf-8")
    done = muster("lab", "check", "communication")
    assert (done.code, done.out.splitlines()[-1]) == (0, "communication: 20 of 20 points")
    page = muster("lab", "report", "communication")
    assert page.code == 0
    assert page.out == "report: labs/communication/report.html\n"
    assert "20 of 20 points" in (at.path / "report.html").read_text()
