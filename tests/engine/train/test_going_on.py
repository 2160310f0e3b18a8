"""The parts of going on with a training: when it saves, what it says, and what is cut off and kept."""

import json
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_worlds import made_up_world
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status, render
from torchmuster.train.checkpointing.checkpointer import SaveReport
from torchmuster.train.checkpointing.policy import (
    CheckpointPolicy,
    CheckpointSettings,
    save_message,
)
from torchmuster.train.reports import MetricsFiles
from torchmuster.train.stop_request import StoppedAtRequest
from torchmuster.worker.data import batches_of

pytestmark = pytest.mark.engine

WORLD = made_up_world()


def report(step: int, problem: str | None = None) -> SaveReport:
    size = 0 if problem else 3 * 2**30 // 2
    return SaveReport(
        step=step, name="", size_bytes=size, stall_s=0.021, waited_s=0.0, took_s=3.14,
        problem=problem,
    )  # fmt: skip


class Noting:
    """Stands for a Checkpointer; saves of some steps fail."""

    def __init__(self, failing: tuple[int, ...] = (), found: tuple[Finding, ...] = ()) -> None:
        self.saved: list[int] = []
        self._failing = list(failing)
        self._found = list(found)

    def check_room(self, state: Any) -> list[Finding]:
        return self._found

    def poll(self) -> None:
        """Say nothing of saves that have ended."""

    def save(self, state: Any, step: int, *, own: Any, best: Any) -> None:
        assert (state, own, best) == ({"a": 1}, {"b": 2}, None)
        self.saved.append(step)

    def wait(self) -> SaveReport | None:
        if not self.saved:
            return None
        step = self.saved[-1]
        if step in self._failing:
            self._failing.remove(step)
            return report(step, "the disk is full")
        return report(step)


class Asked:
    """Stands for a StopRequest."""

    origin = "SIGTERM to rank 3"

    def due(self, step: int) -> bool:
        return step == 5


def saves(checkpointer: Noting, **how: Any) -> CheckpointPolicy:
    saving = CheckpointSettings(to="x", **how)
    return CheckpointPolicy(saving, checkpointer, take=lambda: ({"a": 1}, {"b": 2}))  # type: ignore[arg-type]


def test_saves_are_due_by_steps_or_by_the_clock_of_all() -> None:
    by_steps = saves(Noting(), every=3)
    assert [step for step in range(1, 8) if by_steps.is_due(step, 0.0)] == [3, 6]
    by_time = saves(Noting(), every_s=10.0)
    due = []
    for step in range(1, 30):
        elapsed_s = 2.0 * (step - step % 3)  # what all ranks know grows with each line
        if by_time.is_due(step, elapsed_s):
            by_time.save(step, elapsed_s)
            due.append(step)
    assert due == [6, 12, 18, 24]
    at_the_end = saves(Noting())
    assert not any(at_the_end.is_due(step, 1e6) for step in range(1, 50))
    with pytest.raises(Impossible, match="every_s is 0"):
        CheckpointSettings(to="x", every_s=0.0)


def test_a_request_to_end_is_followed_with_a_save(snapshot: SnapshotAssertion) -> None:
    checkpointer = Noting()
    saving = saves(checkpointer, stop=Asked())
    saving.end_if_requested(4, 0.0)
    with pytest.raises(StoppedAtRequest) as stopped:
        saving.end_if_requested(5, 0.0)
    assert checkpointer.saved == [5]
    assert "SIGTERM to rank 3" in stopped.value.what
    assert stopped.value.what == snapshot
    with pytest.raises(MusterError) as failed:
        saves(Noting(failing=(5, 5)), stop=Asked()).end_if_requested(5, 0.0)
    assert "the disk is full" in failed.value.why
    assert failed.value == snapshot


def test_too_little_room_ends_a_training_before_it_begins() -> None:
    little = Finding(name="room", status=Status.WARNING, what="the disk is small", fix="clear it")
    none = Finding(name="room", status=Status.FAILURE, what="no room", why="why", fix="fix")
    assert saves(Noting(found=(little,))).check_room({}) == render([little])
    with pytest.raises(Impossible) as refusal:
        saves(Noting(found=(little, none))).check_room({})
    assert str(refusal.value) == "no room\nwhy\nfix"


def test_a_save_that_fails_is_told_with_what_follows(
    snapshot: SnapshotAssertion,
) -> None:
    assert save_message(report(120)) == ""
    failed = save_message(report(120, "the disk is full"))
    assert "         why  the disk is full\n" in failed
    assert failed == snapshot(name="failed")
    at_the_end = save_message(report(120, "the disk is full"), is_last=True)
    assert at_the_end == snapshot(name="failed at the end")


def test_metrics_of_steps_that_are_made_again_are_cut_off(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    lines = "".join(json.dumps({"step": step}) + "\n" for step in range(1, 6))
    (folder / "steps.jsonl").write_text(lines + '{"step": 2, "lo')
    (folder / "evaluations.jsonl").write_text(lines)
    MetricsFiles(tmp_path).cut_off_after(3, evaluated=2)
    assert (folder / "steps.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert (folder / "evaluations.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    MetricsFiles(tmp_path).cut_off_after(0, evaluated=0)
    assert (folder / "steps.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("given", "kept", "whole", "line"),
    [
        ({}, None, None, ""),
        ({"micro_batch_size": "4"}, 8, 8, ""),
        (
            {"micro_batch_size": "4"},
            32,
            32,
            "the global batch size stays 32, as in the resumed run; "
            "the ranks compute at most 8 samples at once",
        ),
        ({"global_batch_size": "32"}, 32, 32, ""),
    ],
)
def test_a_step_stays_as_large_as_it_was(
    given: dict[str, str],
    kept: int | None,
    whole: int | None,
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [Flag(flag="", path=f"train.{name}", text=text) for name, text in given.items()]
    settings = resolve_settings(flags=flags).settings
    chosen = batches_of(settings, made_up_world(ranks=2), resumed=kept)
    assert chosen["global_batch_size"] == whole
    assert capsys.readouterr().out.strip() == line


def test_another_size_of_a_step_is_refused(snapshot: SnapshotAssertion) -> None:
    settings = resolve_settings(
        flags=[Flag(flag="", path="train.global_batch_size", text="64")]
    ).settings
    with pytest.raises(Impossible, match="global_batch_size is 64") as refusal:
        batches_of(settings, WORLD, resumed=32)
    assert refusal.value == snapshot
