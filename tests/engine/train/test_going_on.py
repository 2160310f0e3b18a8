"""The parts of going on with a training: when it saves, what it says, and what is cut off and kept."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from made_up_worlds import made_up_world
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.checkpointing import saves
from torchmuster.train.checkpointing.checkpointer import SaveReport
from torchmuster.train.checkpointing.saves import CheckpointSettings, Saves
from torchmuster.train.reports import MetricsFiles
from torchmuster.train.stop_request import StoppedAtRequest
from torchmuster.worker.data import batches_of

pytestmark = pytest.mark.engine

WORLD = made_up_world()


def report(step: int, problem: str | None = None) -> SaveReport:
    size = 0 if problem else 3 * 2**30 // 2
    return SaveReport(
        step=step, name="", size_bytes=size, stall_s=0.021, took_s=3.14, problem=problem
    )


class Noting:
    """Stands for a Checkpointer; saves of some steps fail."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.saved: list[int] = []
        self._failing = failing

    def poll(self) -> None:
        """Say nothing of saves that have ended."""

    def save(self, state: Any, step: int, *, own: Any, best: Any) -> None:
        assert state == {"optimizer": {"state": {}}}
        self.saved.append(step)

    def wait(self) -> SaveReport | None:
        if not self.saved:
            return None
        step = self.saved[-1]
        return report(step, "the disk is full" if step in self._failing else None)

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class Asked:
    """Stands for a StopRequest."""

    origin = "SIGTERM to rank 3"

    def due(self, step: int) -> bool:
        return step == 5


def saves_of(
    checkpointer: Noting, monkeypatch: pytest.MonkeyPatch, **how: Any
) -> tuple[Saves, Any]:
    monkeypatch.setattr(saves, "Checkpointer", lambda *_, **__: checkpointer)
    trainer: Any = SimpleNamespace(
        world=WORLD,
        loader=None,
        step=0,
        strategy=SimpleNamespace(value=SimpleNamespace(name="single")),
        optimizer=SimpleNamespace(state={}),
        state=lambda: {"optimizer": {"state": {}}},
        log=SimpleNamespace(spending=lambda _: nullcontext()),
    )
    return Saves(trainer, CheckpointSettings(to="x", **how)), trainer


def test_saves_are_due_by_steps_or_by_the_clock_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for how, due in (
        ({"every": 3}, [3, 6, 9, 12]),
        ({"every_s": 10.0}, [6, 12]),
        ({}, []),
    ):
        checkpointer = Noting()
        saving, trainer = saves_of(checkpointer, monkeypatch, **how)
        for step in range(1, 15):
            trainer.step = step
            saving.after_step(2.0 * (step - step % 3))  # what all ranks know grows with each line
        assert checkpointer.saved == due


@pytest.mark.parametrize("setting", ["every", "every_s", "keep"])
def test_a_setting_of_0_is_refused(setting: str) -> None:
    with pytest.raises(Impossible, match=f"{setting} is 0"):
        CheckpointSettings(to="x", **{setting: 0})  # type: ignore[arg-type]


def test_a_stop_request_is_followed_with_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Noting()
    saving, trainer = saves_of(checkpointer, monkeypatch, stop=Asked())
    trainer.step = 4
    saving.after_step(0.0)
    trainer.step = 5
    with pytest.raises(StoppedAtRequest) as stopped:
        saving.after_step(0.0)
    assert checkpointer.saved == [5]
    assert "SIGTERM to rank 3" in stopped.value.what
    saving, trainer = saves_of(Noting(failing=(5,)), monkeypatch, stop=Asked())
    trainer.step = 5
    with pytest.raises(MusterError) as failed:
        saving.after_step(0.0)
    assert "the disk is full" in failed.value.why


def test_a_final_save_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    saving, trainer = saves_of(Noting(failing=(7,)), monkeypatch)
    trainer.step = 7
    with pytest.raises(MusterError, match="the final state, step 7, could not be saved") as failed:
        saving.__exit__(None, None, None)
    assert "the disk is full" in failed.value.why


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
