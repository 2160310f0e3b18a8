"""The result file of the GPU tests has outcomes, and nothing that names a host or a user."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

CONFTEST = Path(__file__).parents[1] / "gpu" / "conftest.py"


def test_the_result_file_has_outcomes_and_no_texts(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  gpus\n")
    lines = ["import pytest", "pytestmark = pytest.mark.gpus(0)"]
    lines += ["def test_a(): pass", "def test_b(): raise OSError('/home/ann')"]
    (tmp_path / "test_it.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    result = json.loads((tmp_path / "build" / "gpu-tests.json").read_text())
    assert set(result) == {"torch", "cuda", "rocm", "nccl", "gpus", "tests"}
    assert result["tests"] == {"test_a": "passed", "test_b": "failed"}
