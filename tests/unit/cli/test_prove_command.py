"""``muster prove``: what is refused before anything is started."""

from pathlib import Path

import pytest

from muster_command import Muster
from torchmuster.errors import ExitCode

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["other.py"], "there is no script 'other.py'"),
        (["--steps", "2", "train.py"], "'2' is not a number of at least 4"),
        (["--ranks", "0", "train.py"], "'0' is not a list of numbers"),
        (["--only", "speed", "train.py"], "'speed' is not a property"),
        (["--only", "resume.never", "train.py"], "'resume.never' is not a property"),
        (["--allow", "everything", "train.py"], "invalid choice"),
        (["--lr", "1e-4", "train.py"], "unrecognized arguments: --lr"),
        (["c.yaml", "--steps", "9"], "--steps is beside the settings file"),
        (["--device", "gpu", "train.py"], "there are not enough GPUs"),
        (["--config", "c.yaml", "train.py"], "train.py is beside the settings file"),
        ([], "there is no script to run"),
    ],
)
def test_what_cannot_be_proved_is_refused_at_once(
    muster: Muster, tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "train.py").write_text("print('never run here')\n")
    result = muster("prove", *words)
    assert result.code == ExitCode.IMPOSSIBLE
    assert said in result.err
    assert not Path("prove").exists()
