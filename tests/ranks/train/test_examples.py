"""The examples run as their readers run them: alone, under torchrun and under muster run."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from muster_command import Muster
from ranks.conftest import Python, Ran, Torchrun

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

SETTINGS = """\
experiment_name: poles
distributed:
  enabled: true
  num_gpus: 3
  strategy: ddp
train:
  learning_rate: 0.003
  clip_norm: 0.5
"""


@pytest.fixture
def muster_run(muster: Muster) -> Callable[..., Ran]:
    """Run a script on two ranks under ``muster run``; its ranks' lines come back without their marks."""

    def run(script: str, *words: str) -> Ran:
        flags = ("--device", "cpu", "--ranks", "2")
        done = muster("run", *flags, script, *words)
        return Ran(done.code, done.out, done.err)

    return run


def numbers(ran: Ran, name: str) -> list[float]:
    """Return every number that was printed after a name, in order."""
    assert ran.code == 0, ran.out + ran.err
    return [float(one) for one in re.findall(rf"{name} (\d+\.\d+)", ran.out)]


def test_the_image_classifier_learns_the_same_with_a_loop_and_with_trainer(
    torchrun: Torchrun, muster_run: Callable[..., Ran]
) -> None:
    loop = torchrun(str(EXAMPLES / "image_classifier_own_loop.py"), "--epochs", "1")
    (accuracy,), (loss,) = numbers(loop, "accuracy"), numbers(loop, "loss")
    assert accuracy > 50  # of four kinds
    trainer = str(EXAMPLES / "image_classifier_trainer.py")
    ran = muster_run(trainer, "--epochs", "1")
    assert f"in the end: accuracy {accuracy}%, loss {loss:.4f}" in ran.out, ran.err


def test_the_language_model_learns_the_same_alone_sharded_and_with_trainer(
    python: Python, torchrun: Torchrun
) -> None:
    loop = str(EXAMPLES / "language_model_own_loop.py")
    alone = numbers(python(loop, "--epochs", "1"), "loss")
    sharded = torchrun(loop, "--epochs", "1", "--strategy", "fsdp")
    trainer = torchrun(str(EXAMPLES / "language_model_trainer.py"), "--epochs", "1")
    assert len(alone) == 1
    assert alone[0] < 5.0  # without learning it is the logarithm of 256, which is 5.5
    assert numbers(sharded, "loss") == pytest.approx(alone, abs=2e-4)
    assert numbers(trainer, "in the end: loss") == pytest.approx(alone, abs=2e-4)


def test_ppo_learns_on_two_ranks_from_a_settings_file(torchrun: Torchrun, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(SETTINGS)
    ran = torchrun(
        str(EXAMPLES / "train_distributed_ppo.py"),
        *("--config", "config.yaml", "--updates", "11"),
    )
    lengths = numbers(ran, "games of")
    assert len(lengths) == 3, ran.out  # rank 0 alone speaks
    assert lengths[0] < 30
    assert lengths[-1] > 2 * lengths[0]
    assert "num_gpus is 3, but the ranks are 2: start 3 of them" in ran.out
    assert "poles, update 0:" in ran.out


def test_examples_are_short_and_the_loops_use_no_trainer() -> None:
    for path in EXAMPLES.glob("*.py"):
        limit = 150 if path.name == "train_distributed_ppo.py" else 100
        assert len(path.read_text().splitlines()) < limit, path.name
        if path.name.endswith("own_loop.py"):
            assert "torchmuster.train.trainer" not in path.read_text()
        assert path.name in (EXAMPLES / "README.md").read_text()
