"""Kill every process of a training at every moment, and test that it always finishes with the same weights.

    PYTHONPATH=tests python -m stress.kill_matrix --events 200 --seed 1 --out benchmarks/results/kill-matrix.md

A run that fails is printed with its kills; ``--only 7`` with the same seed and number of events repeats run 7.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from stress.kill_matrix.events import EVENTS_OF_A_RUN, plans
from stress.kill_matrix.judging import Judge
from stress.kill_matrix.struck_run import steps_for
from stress.kill_matrix.table import render


def main() -> int:
    """Do what was asked; return 1 if a run was not as it must be."""
    parser = argparse.ArgumentParser(prog="stress.kill_matrix", description=__doc__)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--of-a-run", type=int, default=EVENTS_OF_A_RUN, help="events of one run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", metavar="RUN", help="these runs alone")
    parser.add_argument("--out", type=Path, help="write the page there")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    judge = Judge(
        folder, steps=steps_for(asked.of_a_run), tell=lambda text: print(text, flush=True)
    )
    began_s = time.monotonic()
    results = [
        judge.judge(plan)
        for plan in plans(asked.events, asked.seed, of_a_run=asked.of_a_run)
        if asked.only is None or plan.number in asked.only
    ]
    tables = render(results, seed=asked.seed, took_s=time.monotonic() - began_s)
    print(tables)
    if asked.out:
        asked.out.write_text(tables)
    failed = [result for result in results if result.problem]
    if failed:
        print(f"their files are in {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
