"""Repeat tests on a machine that is kept busy, to find the ones that fail only there.

Runs the default tier three times and its rank and host tests ten times next to two processes that compute
without end. Each round adds a row to tests/loaded-runs.csv when it is done, so the script can be interrupted and
continued; delete the file to begin anew.
"""

import csv
import datetime
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "loaded-runs.csv"
COLUMNS = ["date", "commit", "part", "passed", "failed twice", "flaky", "minutes"]
ROUNDS = {"default": 3, "ranks and hosts": 10}
SELECTED = {"default": [], "ranks and hosts": ["-m", "ranks or hosts"]}
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))\n"


def main() -> None:
    """Run the rounds that are missing."""
    while part := next((part for part in ROUNDS if done(part) < ROUNDS[part]), None):
        print(f"== {part}: round {done(part) + 1} of {ROUNDS[part]}", flush=True)
        add(part)


def done(part: str) -> int:
    """Return how many rounds of a part have their row."""
    if not RESULTS.exists():
        return 0
    with RESULTS.open(newline="") as file:
        return sum(row["part"] == part for row in csv.DictReader(file))


def add(part: str) -> None:
    """Run one round and write its row."""
    report = ROOT / "build" / "loaded.xml"
    flaky = ROOT / "build" / "flaky.csv"
    before = flaky.read_text() if flaky.exists() else ""
    begun = time.monotonic()
    command = [
        sys.executable,
        "scripts/run_tests.py",
        "-n",
        "auto",
        "--no-skips",
        "--tier",
        "default",
    ]
    with two_busy_processes():
        code = subprocess.run(
            [*command, f"--junitxml={report}", *SELECTED[part]],
            cwd=ROOT,
            env={**os.environ, "CI": "true"},
        ).returncode
    if code not in (0, 1):
        raise SystemExit(f"pytest ended with {code}: no row written")
    new = (flaky.read_text() if flaky.exists() else "").removeprefix(before)
    unsteady = [row[2] for row in csv.reader(new.splitlines())]
    suite = ElementTree.parse(report).getroot()[0].attrib
    wrong = int(suite["failures"]) + int(suite["errors"])
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        rows = csv.writer(file)
        if is_new:
            rows.writerow(COLUMNS)
        rows.writerow(
            [
                datetime.date.today().isoformat(),
                commit.stdout.strip(),
                part,
                int(suite["tests"]) - wrong,
                wrong - len(unsteady),
                " ".join(unsteady),
                round((time.monotonic() - begun) / 60),
            ]
        )


@contextmanager
def two_busy_processes() -> Iterator[None]:
    """Keep two cores busy; the processes exit with this one, however it ends."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
