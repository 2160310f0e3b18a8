"""The self-test from the command to the result file, on the CPU; each check fails on its planted fault."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchmuster.selftest.checks.all_checks import CHECKS

# What this host can run; the others need GPUs, NVML or other hosts.
ON_CPU = [one.id for one in CHECKS if not one.needs]


def _selftest(folder: Path, *words: str) -> dict[str, Any]:
    """Run the command; return the verdict of each check."""
    command = [sys.executable, "-m", "torchmuster", "selftest", "--device", "cpu", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    record = json.loads((folder / "selftest.json").read_text())
    found = {one["id"]: one["verdict"] for one in record["checks"]}
    said = "\n".join(f"{one['id']}: {one['says']}" for one in record["checks"])
    assert done.returncode == 0, done.stderr + said
    assert list(folder.iterdir()) == [folder / "selftest.json"]
    return found


def test_from_the_command_to_the_result_file(tmp_path: Path) -> None:
    names = ["out-of-memory", "uuid-selection"]
    assert _selftest(tmp_path, *names) == {
        "uuid-selection": "not run",
        "out-of-memory": "confirmed",
    }


@pytest.mark.timeout(3000)
def test_all_checks_of_the_cpu_are_confirmed(tmp_path: Path) -> None:
    found = _selftest(tmp_path, "--minutes", "45")
    assert {name for name, verdict in found.items() if verdict == "confirmed"} == set(ON_CPU)


@pytest.mark.timeout(3000)
def test_all_checks_of_the_cpu_fail_on_their_planted_faults(tmp_path: Path) -> None:
    found = _selftest(tmp_path, "--minutes", "45", "--planted-faults")
    assert {name for name, verdict in found.items() if verdict == "refuted"} == set(ON_CPU)
