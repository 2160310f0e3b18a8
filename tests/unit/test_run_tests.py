"""A test that fails is run once more: flaky if it passes then, a failure if not."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_tests.py"
TESTS = """
from pathlib import Path

def test_good():
    pass

def test_flaky():
    ran = Path("ran")
    before = ran.exists()
    ran.touch()
    assert before

def test_bad():
    assert {good}
"""


@pytest.mark.parametrize("good", [True, False])
def test_only_what_fails_twice_fails_the_run(good: bool, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(TESTS.format(good=good))
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a", "--allow-empty"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "-n", "0", "-q"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == (0 if good else 1)
    last = done.stdout.splitlines()[-2:] if good else done.stdout.splitlines()[-3:]
    expected = ["flaky: test_some.py::test_flaky"]
    if not good:
        expected.insert(0, "FAILED twice: test_some.py::test_bad")
    assert last == [f"failed twice: {len(expected) - 1}, flaky: 1", *expected]
    with (tmp_path / "build" / "flaky.csv").open() as file:
        assert [row[2] for row in csv.reader(file)] == ["test_some.py::test_flaky"]
