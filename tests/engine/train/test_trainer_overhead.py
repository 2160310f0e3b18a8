"""A step of Trainer costs next to nothing over a step written by hand. How it is measured: benchmarks/README.md."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import GIVE_UP_S

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.nightly]

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "overhead.py"
# Far from what is wanted of it, and one good measurement of three is enough: other machines, and what
# else they do, must not fail this. It is an alarm for what costs much more than it should.
MOST_US = 150
TRIES = 3


def extra_us(out: Path) -> float:
    words = ["--rank-writes", str(out), "--sizes", "small", "--readings", "ready", "--pairs", "8"]
    subprocess.run(
        [sys.executable, str(BENCHMARK), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=GIVE_UP_S,
    )
    (small,) = json.loads(out.read_text())
    return float(small["extra_us_of_best_blocks"])


def test_a_step_costs_little_more_than_in_a_loop_written_by_hand(tmp_path: Path) -> None:
    seen: list[float] = []
    while not seen or (min(seen) >= MOST_US and len(seen) < TRIES):
        seen.append(extra_us(tmp_path / "overhead.json"))
    assert min(seen) < MOST_US, seen
