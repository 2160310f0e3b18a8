"""A learner's code that takes long is not waited for in silence, nor for ever."""

import re
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.errors import MusterError
from torchmuster.labs import grading

# Answers once it was said that it takes long; whether that was said is a file.
SLOW = """\
import pathlib, sys, time
while not pathlib.Path("said").exists():
    time.sleep(0.01)
pathlib.Path(sys.argv[2]).write_text("answer")
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slow_program.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(grading, "_SAY_EVERY_S", 0.05)
    monkeypatch.setattr(grading, "EXAMINER", "slow_program")
    return tmp_path


def test_it_is_said_that_code_still_runs(slow: Path, snapshot: SnapshotAssertion) -> None:
    told: list[str] = []

    def say(text: str) -> None:
        told.append(text)
        (slow / "said").touch()

    answer = grading.ask_examiner(b"{}", within_s=GIVE_UP_S, say=say)
    assert answer == b"answer"
    assert re.sub(r"\d+ s", "N s", told[0]) == snapshot


def test_what_never_answers_is_ended(slow: Path) -> None:
    with pytest.raises(MusterError, match=r"the lab's code did not finish within 0\.2 s"):
        grading.ask_examiner(b"{}", within_s=0.2, say=lambda _: None)
