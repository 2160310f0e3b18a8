"""In CI a property is tried with the same examples at every run, whatever was imported before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("conftest", sys.argv[1])
conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conftest)
conftest.pytest_configure()
if len(sys.argv) > 2:
    sys.path.insert(0, sys.argv[2])
    import full_of_numbers
from hypothesis import given, strategies as st
drawn = []
@given(st.integers(), st.text())
def draw(number, text):
    drawn.append((number, text))
draw()
print(drawn)
"""


def drawn(folder: Path, *modules: Path, **env: str) -> str:
    (folder / "draws.py").write_text(PROGRAM)  # from a file: its text decides what is drawn
    words = [sys.executable, "draws.py", str(CONFTEST), *map(str, modules)]
    return subprocess.run(
        words, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=True
    ).stdout


def test_examples_are_the_same_in_ci_unless_others_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = "\n".join(f"x{one} = {123_456_789 + one}" for one in range(100))
    (tmp_path / "full_of_numbers.py").write_text(numbers)
    monkeypatch.delenv("HYPOTHESIS_RANDOM", raising=False)
    first = drawn(tmp_path, CI="true")
    assert len(first) > 1000
    assert drawn(tmp_path, CI="true") == first
    assert drawn(tmp_path, tmp_path, CI="true") == first
    assert drawn(tmp_path, CI="true", HYPOTHESIS_RANDOM="1") != first
