"""Every parser of foreign bytes, fuzzed for a second each, or for two minutes each in the nightly stress tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.targets import TARGETS
from patience import GIVE_UP_S

TESTS = Path(__file__).parents[1]


def fuzzed(name: str, seconds: float) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", name, "--seconds", str(seconds)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=seconds + GIVE_UP_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_reads_or_refuses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = fuzzed(name, 1)
    with capsys.disabled():
        print(told, end="")


@pytest.mark.stress
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_reads_or_refuses_for_long(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``FUZZ_SECONDS=3600`` takes longer."""
    told = fuzzed(name, float(os.environ.get("FUZZ_SECONDS", "120")))
    with capsys.disabled():
        print(told, end="")
