"""``muster profile``: what is refused before anything is started."""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from torchmuster.errors import ExitCode

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text("print('never imported here')\n")
    (tmp_path / "c.yaml").write_text(
        "model: {build: 'own:model'}\ndata: {dataset: 'own:data'}\n"
        "train: {steps: 20, learning_rate: 0.1}\n"
    )
    return "c.yaml"


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("print('never run here')\n")
    return "train.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "3:4", "train.py"], "'3:4' is not a valid range of steps"),
        (["--steps", "20:10", "train.py"], "'20:10' is not a valid range of steps"),
        (["--config", "x.yaml", "train.py"], "beside the settings file x.yaml"),
        (["--device", "gpu", "train.py"], "1 ranks on GPUs requested"),
        (["other.py"], "there is no script 'other.py'"),
        (["nowhere"], "there is no script 'nowhere'"),
    ],
)
def test_what_cannot_be_profiled_is_refused_at_once(
    muster: Muster, script: str, words: list[str], said: str
) -> None:
    result = muster("profile", *words)
    assert result.code != 0
    assert said in result.err
    assert not Path("profile").exists()


def test_more_steps_than_the_settings_have_are_refused_at_once(
    muster: Muster, settings: str, snapshot: SnapshotAssertion
) -> None:
    result = muster("profile", "--device", "cpu", settings)
    assert result.code == ExitCode.IMPOSSIBLE
    assert result.err == snapshot
    assert not Path("profile").exists()
