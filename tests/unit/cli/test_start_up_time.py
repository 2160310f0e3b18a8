"""A command that only looks must answer at once: under 0.3 s, median of 20, as started by a shell."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario

LIMIT_S = 0.3
INSTALLED = Path(sys.executable).parent / "muster"


@pytest.mark.alone
@pytest.mark.parametrize(
    "words", [["--help"], ["config", "show"], ["gpus", "--json"]], ids=" ".join
)
def test_commands_answer_at_once(
    words: list[str], machine: Callable[[Scenario], Path], record_property: Callable[..., None]
) -> None:
    machine(scenarios.eight_a100())
    times = []
    for _ in range(20):
        started = time.perf_counter()
        subprocess.run([INSTALLED, *words], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    median = statistics.median(times)
    record_property("median_s", median)
    print(f"muster {' '.join(words)}: median of 20: {median:.3f} s")
    assert median < LIMIT_S
