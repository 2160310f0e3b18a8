"""The examples run as their readers run them: alone, under torchrun and under muster run."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from ranks.conftest import Python, Ran, Torchrun

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

SETTINGS = """\
experiment_name: digits
distributed:
  enabled: true
  num_gpus: 3
  strategy: ddp
train:
  learning_rate: 0.002
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


@pytest.mark.nightly
def test_the_image_classifier_learns_the_same_with_a_loop_and_with_trainer(
    torchrun: Torchrun, muster_run: Callable[..., Ran]
) -> None:
    loop = torchrun(str(EXAMPLES / "image_classifier_own_loop.py"), "--epochs", "1")
    (accuracy,), (loss,) = numbers(loop, "accuracy"), numbers(loop, "loss")
    assert accuracy > 50  # of four kinds
    trainer = str(EXAMPLES / "image_classifier_trainer.py")
    ran = muster_run(trainer, "--epochs", "1")
    assert f"in the end: accuracy {accuracy}%, loss {loss:.4f}" in ran.out, ran.err


@pytest.mark.nightly
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


def test_ppo_raises_its_reward_on_two_ranks_from_a_settings_file(
    torchrun: Torchrun, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """As examples/README.md states it: with seed 0 the mean reward rises by more than 0.7."""
    (tmp_path / "config.yaml").write_text(SETTINGS)
    ran = torchrun(
        str(EXAMPLES / "train_distributed_ppo.py"),
        *("--config", "config.yaml", "--updates", "21"),
    )
    rewards = numbers(ran, "reward")
    assert len(rewards) == 3, ran.out  # rank 0 alone speaks
    assert rewards[0] < 0.15  # one digit of ten is right by chance
    assert rewards[-1] - rewards[0] > 0.7
    (mismatch,) = [line for line in ran.out.splitlines() if "num_gpus is 3" in line]
    assert mismatch == snapshot
    assert "digits, update 0:" in ran.out


def test_ppo_runs_under_muster_run_without_a_settings_file(muster_run: Callable[..., Ran]) -> None:
    ran = muster_run(str(EXAMPLES / "train_distributed_ppo.py"), "--updates", "1")
    assert len(numbers(ran, "reward")) == 1


@pytest.mark.nightly
def test_lora_trains_adapters_alone_and_the_loss_falls(torchrun: Torchrun, tmp_path: Path) -> None:
    ran = torchrun(str(EXAMPLES / "fine_tune_with_lora.py"), "--out", "adapters")
    before, after = numbers(ran, "loss")
    assert after < before - 0.5, ran.out
    trained, of_all = re.findall(r"trained ([\d,]+) of ([\d,]+) weights", ran.out)[0]
    assert int(trained.replace(",", "")) < 0.2 * int(of_all.replace(",", ""))
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert saved
    assert all(".lora_" in name for name in saved)
