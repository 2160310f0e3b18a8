"""The wrappers for DeepSpeed and torchtitan, with stand-ins for their classes; real ones in tests/libraries."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchmuster.checkpoints.foreign import Completeness, condition_of
from torchmuster.integrations import recorder as recording
from torchmuster.integrations.deepspeed import watch_engine
from torchmuster.integrations.recorder import begin_recording
from torchmuster.integrations.torchtitan import watch_metrics


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Record in this process; return a function that returns the lines."""
    monkeypatch.setattr(recording, "recorder", None)
    monkeypatch.delitem(sys.modules, "accelerate.accelerator", raising=False)
    recorder = begin_recording(0, tmp_path, 1)

    def lines() -> list[dict[str, Any]]:
        recorder.end()
        text = (tmp_path / "rank-0.metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    return lines


class Engine:
    """Steps after every second backward, as with an accumulation of 2."""

    def __init__(self) -> None:
        self.global_steps = self.micro_steps = 0

    def backward(self, loss: float) -> float:
        return loss

    def step(self) -> None:
        self.micro_steps += 1
        self.global_steps = self.micro_steps // 2

    def save_checkpoint(self, save_dir: Path, tag: str | None = None) -> bool:
        folder = Path(save_dir) / (tag or f"global_step{self.global_steps}")
        folder.mkdir(parents=True)
        (folder / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04")
        return True


def test_deepspeed_engine(recorded: Any, tmp_path: Path) -> None:
    class Own(Engine):
        """The wrappers stay on this class."""

    watch_engine(cast(Any, SimpleNamespace(DeepSpeedEngine=Own)))
    engine = Own()
    for loss in (4.0, 3.0, 2.0, 1.0):
        assert engine.backward(loss) == loss
        engine.step()
    assert engine.save_checkpoint(tmp_path / "out")
    assert engine.save_checkpoint(tmp_path / "out", "best")
    found = recorded()
    assert [(one["step"], one["loss"]) for one in found if one["file"] == "steps"] == [
        (1, 3.0),
        (2, 1.0),
    ]
    saves = [one for one in found if one["file"] == "saves"]
    assert [(one["library"], one["step"], Path(one["path"]).name) for one in saves] == [
        ("deepspeed", 2, "global_step2"),
        ("deepspeed", 2, "best"),
    ]


def test_accelerate_reports_for_deepspeed(
    recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Engine):
        """The wrappers stay on this class."""

    monkeypatch.setitem(sys.modules, "accelerate.accelerator", cast(Any, SimpleNamespace()))
    watch_engine(cast(Any, SimpleNamespace(DeepSpeedEngine=Own)))
    engine = Own()
    for _ in range(2):
        engine.backward(1.0)
        engine.step()
    engine.save_checkpoint(tmp_path / "out")
    recording.recorder.saved("own", library="accelerate")  # type: ignore[union-attr]
    assert [one.get("library") for one in recorded()] == ["accelerate"]


def test_a_deepspeed_checkpoint_without_weights_is_torn(tmp_path: Path) -> None:
    (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"\x80\x02")
    assert condition_of(str(tmp_path), "deepspeed").state is Completeness.TORN


def test_torchtitan_metrics(recorded: Any) -> None:
    class Processor:
        """Logs as torchtitan's MetricsProcessor does."""

        def log(
            self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float
        ) -> int:
            return step

    watch_metrics(cast(Any, SimpleNamespace(MetricsProcessor=Processor)))
    processor = Processor()
    assert processor.log(1, 2.0, 3.0, 0.5) == 1
    assert processor.log(2, global_avg_loss=1.0, global_max_loss=2.0, grad_norm=0.25) == 2
    assert [
        (one["step"], one["loss"], one["loss_max"], one["gradient_norm"]) for one in recorded()
    ] == [(1, 2.0, 3.0, 0.5), (2, 1.0, 2.0, 0.25)]
