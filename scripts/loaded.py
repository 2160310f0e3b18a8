"""Repeat tests on a machine that is kept busy, to find the ones that fail only there.

Runs the default tier three times and its rank and host tests ten times next to two processes that compute
without end. A round has several parts, each of some test files. Each part adds a row to tests/loaded-runs.csv when it is
done, so the script can be interrupted and continued; delete the file to begin anew. ``loaded.py 30`` begins no part after
30 minutes.
"""

import csv
import datetime
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "loaded-runs.csv"
COLUMNS = ["date", "commit", "tests", "round", "part", "passed", "failed twice", "flaky", "minutes"]
ROUNDS = {"ranks and hosts": 10, "default": 3}
SELECTED = {
    "default": ["-m", "not nightly and not alone"],
    "ranks and hosts": ["-m", "(ranks or hosts) and not nightly and not alone"],
}
PARTS = 8  # of a round
FOLDERS = {"default": ("tests", "docs"), "ranks and hosts": ("tests/ranks", "tests/hosts")}
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))\n"


def main() -> None:
    """Run the parts that are missing."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else float("inf")
    begun_s = time.monotonic()
    finished = done()
    for tests, rounds in ROUNDS.items():
        for number in range(1, rounds + 1):
            for part in range(1, PARTS + 1):
                if (tests, number, part) in finished:
                    continue
                if time.monotonic() - begun_s > minutes * 60:
                    return
                print(f"== {tests}: round {number} of {rounds}, part {part} of {PARTS}", flush=True)
                add(tests, number, part)


def done() -> set[tuple[str, int, int]]:
    """Return the tests, round and part of all rows."""
    if not RESULTS.exists():
        return set()
    with RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["tests"], int(row["round"]), int(row["part"])) for row in rows}


def files_of(tests: str, part: int) -> list[str]:
    """Return the test files and documents of a part; a file is always in the same one."""
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS[tests]
        for pattern in ("test_*.py", "*.md")
        for path in (ROOT / folder).rglob(pattern)
        if pattern == "test_*.py" or folder == "docs"
    ]
    return sorted(name for name in found if zlib.crc32(name.encode()) % PARTS == part - 1)


def add(tests: str, number: int, part: int) -> None:
    """Run one part of a round and write its row."""
    report = ROOT / "build" / "loaded.xml"
    flaky = ROOT / "build" / "flaky.csv"
    before = flaky.read_text() if flaky.exists() else ""
    begun = time.monotonic()
    command = [sys.executable, "scripts/run_tests.py", "-n", "auto", "--no-skips"]
    with two_busy_processes():
        code = subprocess.run(
            [*command, f"--junitxml={report}", *SELECTED[tests], *files_of(tests, part)],
            cwd=ROOT,
            env={**os.environ, "CI": "true"},
        ).returncode
    if code not in (0, 1, 5):  # 5: no test of these files is in the tier
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
                tests,
                number,
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
