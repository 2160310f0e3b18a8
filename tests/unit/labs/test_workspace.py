"""The learner's folder: what is started, found, kept and shown; no torch."""

import re
from html import escape
from pathlib import Path

import pytest

from torchmuster.errors import Impossible
from torchmuster.finding import Status
from torchmuster.labs import lesson, report, workspace
from torchmuster.labs.grading import Verdict, mistake_finding, points
from torchmuster.labs.workspace import Grade

DDP = lesson.lesson("ddp")


def test_a_lab_is_copied_once_and_work_is_never_overwritten(tmp_path: Path) -> None:
    started = workspace.start_lab(DDP, tmp_path)
    assert started.file.read_text() == DDP.solution(gaps=True)
    assert "## What to do" in (started.path / "README.md").read_text()
    assert (started.path / "tests" / "test_ddp.py").read_text() == DDP.tests.read_text()
    assert started.answers()[0] == (
        "1. What share of one rank's time did two ranks need for an epoch? Where did the rest go?",
        "",
    )
    started.file.write_text("my work")
    with pytest.raises(Impossible, match="already started") as refused:
        workspace.start_lab(DDP, tmp_path)
    assert str(started.file) in refused.value.fix
    assert started.file.read_text() == "my work"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Impossible, match=re.escape(str(tmp_path / "file" / "labs"))) as refused:
        workspace.start_lab(DDP, tmp_path / "file" / "labs")
    assert "--labs DIR" in refused.value.fix


def test_a_lab_is_found_by_its_name_or_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Impossible, match="no lab is named"):
        workspace.find_lab(None, tmp_path)
    started = workspace.start_lab(DDP, tmp_path)
    assert workspace.find_lab("ddp", tmp_path) == started
    with pytest.raises(Impossible) as refused:
        workspace.find_lab("pipeline", tmp_path)
    assert refused.value.fix == "muster lab start pipeline"
    monkeypatch.chdir(started.path)
    for name in (None, "ddp"):
        found = workspace.find_lab(name, workspace.DEFAULT_ROOT)
        assert found.file.resolve() == started.file.resolve()


def test_a_grade_is_kept_and_one_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    started = workspace.start_lab(DDP, tmp_path)
    assert started.grade() is None
    verdicts = (Verdict(exercise="reduce_mean"), Verdict(exercise="train_epoch", mistake="hangs"))
    grade = Grade(points=points(DDP, verdicts), verdicts=verdicts)
    assert grade.points == 3
    started.save_grade(grade)
    assert started.grade() == grade
    (started.path / "grade.json").write_text("{")
    assert started.grade() is None


def test_a_verdict_as_a_finding() -> None:
    verdict = Verdict(exercise="save_checkpoint", mistake="saved-wrapper", seen="x")
    wrong = mistake_finding(DDP, verdict)
    assert (wrong.name, wrong.status, wrong.evidence) == ("saved-wrapper", Status.FAILURE, "x")
    assert wrong.fix == "self.model.module.state_dict()"
    right = mistake_finding(DDP, Verdict(exercise="reduce_mean"))
    assert right.what == "reduce_mean (3 of 3 points)"
    gap = mistake_finding(DDP, Verdict(exercise="reduce_mean", mistake="not-done"))
    assert (gap.status, gap.name) == (Status.NOTE, "not-done")


def test_a_report_has_grade_plots_and_answers_and_runs_nothing_of_them(tmp_path: Path) -> None:
    started = workspace.start_lab(DDP, tmp_path)
    answers = started.path / "answers.md"
    answers.write_text(answers.read_text().replace("(your answer)", "<b>half</b>", 1))
    mistaken = Verdict(
        exercise="save_checkpoint", mistake="no-barrier", seen="rank 1 found no file"
    )
    started.save_grade(Grade(points=12, verdicts=(mistaken,)))
    (started.path / "loss curve.png").touch()
    page = report.lab_page(started)
    assert "12 of 20 points" in page
    assert escape(mistake_finding(DDP, mistaken).what.partition(": ")[2]) in page
    assert '<a href="loss%20curve.png">loss curve.png</a>' in page
    assert "&lt;b&gt;half&lt;/b&gt;" in page
    assert page.count("Not answered yet: answers.md.") == 2
