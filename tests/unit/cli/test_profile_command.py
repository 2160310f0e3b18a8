"""``muster profile``: what is refused before anything is started."""

from pathlib import Path

import pytest

from muster_command import Muster


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("print('never run here')\n")
    return "train.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "3:4", "train.py"], "'3:4' are no steps that can be traced"),
        (["--steps", "20:10", "train.py"], "'20:10' are no steps that can be traced"),
        (["--on-ranks", "a", "train.py"], "'a' are no ranks"),
        (["--ranks", "2", "--on-ranks", "2", "train.py"], "asked for the trace of rank 2"),
        (["--config", "x.yaml", "train.py"], "a settings file and a script were both named"),
        (["--device", "gpu", "train.py"], "asked for 1 ranks on GPUs"),
        (["other.py"], "there is no script 'other.py'"),
        (["--of", "nowhere"], "there is no profile in nowhere"),
        (["--most", "1 parsec", "train.py"], "is not a size"),
    ],
)
def test_what_cannot_be_profiled_is_refused_at_once(
    muster: Muster, script: str, words: list[str], said: str
) -> None:
    result = muster("profile", *words)
    assert result.code != 0
    assert said in result.err
    assert not Path("profile").exists()
