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
        (["train.py", "--steps", "2"], "'2' is not a number of at least 4"),
        (["train.py", "--ranks", "0"], "'0' is not a list of numbers"),
        (["train.py", "--only", "speed"], "'speed' is not a property"),
        (["train.py", "--stops", "never"], "'never' is not a stop"),
        (["train.py", "--allow", "everything"], "invalid choice"),
        (["train.py", "epochs=3"], "come after --"),
        (["train.py", "--lr", "1e-4"], "unrecognized arguments: --lr"),
        (["train.py", "--device", "gpu"], "there are not enough GPUs"),
        (["--config", "c.yaml", "train.py"], "a settings file and a script were both given"),
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
