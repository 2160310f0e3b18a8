"""The learner's folder: what is started, found, kept and shown; no torch."""

import os
import re
from html import escape
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.labs import lesson, report, workspace
from torchmuster.labs.grading import Verdict, mistake_finding, points
from torchmuster.labs.workspace import Grade

DDP = lesson.lesson("ddp")


def test_a_lab_is_copied_once_and_work_is_never_overwritten(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    started = workspace.start_workspace(DDP, tmp_path)
    assert started.file.read_text() == DDP.starter()
    assert "## What to do" in (started.folder / "README.md").read_text()
    assert (started.folder / "tests" / "test_ddp.py").read_text() == DDP.tests.read_text()
    assert started.answers()[0] == (
        "1. What share of one rank's time did two ranks need for an epoch? Where did the rest go?",
        "",
    )
    started.file.write_text("my work")
    with pytest.raises(Impossible) as refused:
        workspace.start_workspace(DDP, tmp_path)
    assert str(started.file) in refused.value.fix
    assert refused.value.what == snapshot
    assert started.file.read_text() == "my work"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Impossible, match=re.escape(str(tmp_path / "file" / "labs"))) as refused:
        workspace.start_workspace(DDP, tmp_path / "file" / "labs")
    assert "--labs DIR" in refused.value.fix


def test_without_a_name_the_lab_changed_last_is_meant(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as refused:
        workspace.find_workspace(None, tmp_path)
    assert refused.value.what == snapshot
    first = workspace.start_workspace(DDP, tmp_path)
    second = workspace.start_workspace(lesson.lesson("memory"), tmp_path)
    os.utime(first.file, (1000, 1000))
    assert workspace.find_workspace(None, tmp_path).lesson.name == "memory"
    os.utime(second.file, (500, 500))
    assert workspace.find_workspace(None, tmp_path).lesson.name == "ddp"
    with pytest.raises(Impossible) as refused:
        workspace.find_workspace("pipeline", tmp_path)
    assert refused.value.fix == "muster lab start pipeline"


def test_inside_of_a_labs_folder_that_lab_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = workspace.start_workspace(DDP, tmp_path)
    monkeypatch.chdir(started.folder)
    for name in (None, "ddp"):
        found = workspace.find_workspace(name, workspace.DEFAULT_ROOT)
        assert found.file.resolve() == started.file.resolve()


def test_a_grade_is_kept_and_one_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    started = workspace.start_workspace(DDP, tmp_path)
    assert started.grade() is None
    verdicts = (Verdict(exercise="reduce_mean"), Verdict(exercise="train_epoch", mistake="hangs"))
    kept = Grade(points=points(DDP, verdicts), verdicts=verdicts)
    assert kept.points == 3
    started.keep(kept)
    assert started.grade() == kept
    (started.folder / "grade.json").write_text("{")
    assert started.grade() is None


def test_a_verdict_in_words(snapshot: SnapshotAssertion) -> None:
    wrong = mistake_finding(
        DDP, Verdict(exercise="save_checkpoint", mistake="saved-wrapper", seen="x")
    )
    assert wrong.name == "saved-wrapper"
    assert wrong.what == snapshot
    assert wrong.fix == "self.model.module.state_dict()"
    assert (wrong.status.value, wrong.evidence) == ("failure", "x")
    assert (
        mistake_finding(DDP, Verdict(exercise="reduce_mean")).what == "reduce_mean (3 of 3 points)"
    )
    gap = mistake_finding(DDP, Verdict(exercise="reduce_mean", mistake="not-done"))
    assert (gap.status.value, gap.name) == ("note", "not-done")


def test_a_report_has_grade_plots_and_answers_and_runs_nothing_of_them(tmp_path: Path) -> None:
    started = workspace.start_workspace(DDP, tmp_path)
    answers = started.folder / "answers.md"
    answers.write_text(answers.read_text().replace("(your answer)", "<b>half</b>", 1))
    mistaken = Verdict(
        exercise="save_checkpoint", mistake="no-barrier", seen="rank 1 found no file"
    )
    started.keep(Grade(points=12, verdicts=(mistaken,)))
    os.utime(started.folder / "grade.json", (1000, 1000))
    (started.folder / "loss curve.png").touch()
    page = report.lab_page(started)
    assert "12 of 20 points (" in page
    assert escape(mistake_finding(DDP, mistaken).what.partition(": ")[2]) in page
    assert '<a href="loss%20curve.png">loss curve.png</a>' in page
    assert "&lt;b&gt;half&lt;/b&gt;" in page
    assert page.count("Not answered yet: answers.md.") == 2
