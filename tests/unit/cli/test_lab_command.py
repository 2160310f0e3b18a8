"""``muster lab list`` and ``start``, and what all of its actions refuse; no torch."""

import os
from pathlib import Path

from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from torchmuster.labs import lesson, workspace
from torchmuster.labs.workspace import Grade, Workspace


def _reached(root: Path, name: str, points: int) -> Workspace:
    started = workspace.start_workspace(lesson.lesson(name), root)
    started.keep(Grade(points=points, verdicts=()))
    return started


def test_the_list_shows_points_and_how_far_one_is(
    muster: Muster, own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    root = own_machine / "labs"
    _reached(root, "gpu-basics", 20)
    _reached(root, "mixed-precision", 15)
    changed = _reached(root, "distributed", 25)
    os.utime(changed.folder / "grade.json", (1000, 1000))
    workspace.start_workspace(lesson.lesson("memory"), root)
    done = muster("lab", "list")
    assert done.code == 0
    assert done.out == snapshot
    _reached(root, "pipeline", 10)
    assert muster("lab", "list").out.splitlines()[-1] == snapshot


def test_a_lab_is_started_in_a_folder_of_ones_choice(
    muster: Muster, own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    done = muster("lab", "start", "ddp", "--labs", "course")
    assert done.code == 0
    for fact in ("course/ddp/README.md", "course/ddp/ddp.py", "20 points", "muster lab check ddp"):
        assert fact in done.out
    assert done.out == snapshot
    assert (own_machine / "course" / "ddp" / "ddp.py").read_text() == lesson.lesson("ddp").starter()
    again = muster("lab", "start", "ddp", "--labs", "course")
    assert again.code == 2
    assert again.err == snapshot


def test_what_cannot_be_is_refused(muster: Muster, snapshot: SnapshotAssertion) -> None:
    unknown = muster("lab", "start", "dpp")
    assert unknown.code == 2
    assert "'dpp'" in unknown.err
    assert unknown.err == snapshot(name="unknown lab")
    for action in ("check", "report"):
        nothing = muster("lab", action)
        assert nothing.code == 2
        assert "muster lab start communication" in nothing.err
        assert nothing.err == snapshot(name=f"nothing to {action}")
    muster("lab", "start", "ddp")
    exercise = muster("lab", "check", "--only", "everything")
    assert exercise.code == 2
    assert "'everything'" in exercise.err
    assert exercise.err == snapshot(name="unknown exercise")
