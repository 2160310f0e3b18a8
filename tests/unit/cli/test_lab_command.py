"""``muster lab list`` and ``start``, and what all of its actions refuse; no torch."""

import json
from pathlib import Path

from muster_command import Muster
from torchmuster.labs import course, desk
from torchmuster.labs.desk import Desk, Grade


def _reached(root: Path, name: str, points: int) -> Desk:
    started = desk.start(course.lesson(name), root)
    started.keep(Grade(of=started.fingerprint(), points=points, verdicts=()))
    return started


def test_the_list_shows_points_and_how_far_one_is(muster: Muster, own_machine: Path) -> None:
    root = own_machine / "labs"
    _reached(root, "gpu-basics", 20)
    _reached(root, "mixed-precision", 15)
    changed = _reached(root, "distributed", 25)
    changed.file.write_text("pass\n")
    desk.start(course.lesson("memory"), root)
    done = muster("lab", "list")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == ("1  communication      0/20  not started  Set-up and communication")
    assert lines[2].startswith("3  gpu-basics        20/20  done ")
    assert lines[3].startswith("4  mixed-precision   15/20  checked ")
    assert lines[4].startswith("5  distributed       25/25  changed ")
    assert lines[5].startswith("6  memory             0/20  not checked ")
    assert lines[-1] == "60 of 100 points in gpu-basics to pipeline; 70 to pass"
    _reached(root, "pipeline", 10)
    assert muster("lab", "list").out.splitlines()[-1] == (
        "70 of 100 points in gpu-basics to pipeline; passed"
    )
    listed = json.loads(muster("lab", "list", "--json").out)
    assert [one["name"] for one in listed] == list(course.NAMES)
    assert listed[4] == {
        "name": "distributed",
        "title": "Distributed training, scaling and accumulation",
        "points": 25,
        "of": 25,
        "counts": True,
        "state": "changed",
        "folder": "labs/distributed",
    }


def test_a_lab_is_started_in_a_folder_of_ones_choice(muster: Muster, own_machine: Path) -> None:
    done = muster("lab", "start", "ddp", "--labs", "course")
    assert done.code == 0
    assert done.out == (
        "read     course/ddp/reading.md\n"
        "fill in  course/ddp/ddp.py: 6 exercises, 20 points\n"
        "then     muster lab check ddp\n"
    )
    assert (own_machine / "course" / "ddp" / "ddp.py").read_text() == course.lesson("ddp").starter()
    again = muster("lab", "start", "ddp", "--labs", "course")
    assert again.code == 2
    assert "lab ddp has been started before" in again.err


def test_a_solution_is_printed_and_starts_nothing(muster: Muster, own_machine: Path) -> None:
    done = muster("lab", "start", "memory", "--solution")
    assert (done.code, done.out) == (0, course.lesson("memory").solution())
    assert not (own_machine / "labs").exists()


def test_what_cannot_be_is_refused(muster: Muster) -> None:
    unknown = muster("lab", "start", "dpp")
    assert unknown.code == 2
    assert "there is no lab 'dpp'" in unknown.err
    for action in ("check", "report"):
        nothing = muster("lab", action)
        assert nothing.code == 2
        assert "no lab has been started here" in nothing.err
        assert "muster lab start communication" in nothing.err
    muster("lab", "start", "ddp")
    exercise = muster("lab", "check", "--only", "everything")
    assert exercise.code == 2
    assert "lab ddp has no exercise 'everything'" in exercise.err
