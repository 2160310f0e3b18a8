"""Run pytest; run the tests that failed once more, by themselves.

A test that passes then is flaky: it is named in the last lines and noted with the date in build/flaky.csv.
One that fails twice fails the run. ``--changed [REV]`` takes the unit and engine tests of what differs from REV.
"""

import csv
import datetime
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path.cwd()  # scripts/check starts it at the root
FLAKY = ROOT / "build" / "flaky.csv"
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
# More failures than this are a broken change, not a busy machine.
MOST_RERUN = 20
# What a change anywhere can break.
ALWAYS = ["tests/architecture", "tests/golden"]


def main(arguments: list[str]) -> int:
    """Run the tests that the arguments select, and the failed ones again."""
    if "--changed" in arguments:
        place = arguments.index("--changed")
        base = arguments[place + 1]
        arguments = arguments[:place] + arguments[place + 2 :] + tests_of_change(base or upstream())
    LAST_FAILED.unlink(missing_ok=True)
    code = pytest(arguments)
    failed = last_failed()
    if code != 1 or not 0 < len(failed) <= MOST_RERUN:
        return code
    # Blocks of one document build on each other, so they run together.
    again = sorted({test.partition("::")[0] if ".md" in test else test for test in failed})
    print(f"\n== again, by themselves: {len(again)}", flush=True)
    rules = [flag for flag in arguments if flag == "--no-skips"]
    code = pytest([*rules, "-n", "0", *again])
    flaky = failed - last_failed() if code in (0, 1) else set()
    note_flaky(flaky)
    print(f"\nfailed twice: {len(failed - flaky)}, flaky: {len(flaky)}")
    for test in sorted(failed):
        print(f"{'flaky' if test in flaky else 'FAILED twice'}: {test}")
    return code


def pytest(arguments: list[str]) -> int:
    """Run pytest in a process of its own; return its exit code."""
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT).returncode


def last_failed() -> set[str]:
    """Return the tests that failed in the last run."""
    return set(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else set()


def note_flaky(tests: set[str]) -> None:
    """Add tests that failed once and then passed to the list."""
    if not tests:
        return
    FLAKY.parent.mkdir(exist_ok=True)
    with FLAKY.open("a", newline="") as file:
        rows = csv.writer(file)
        for test in sorted(tests):
            rows.writerow(
                [datetime.date.today().isoformat(), git("rev-parse", "--short", "HEAD"), test]
            )


def tests_of_change(base: str) -> list[str]:
    """Return the unit and engine tests that changed or import a changed module directly."""
    changed = set(git("diff", "--name-only", base, "--", "*.py").splitlines())
    changed |= set(git("ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines())
    command = [sys.executable, "-m", "ruff", "analyze", "graph", "--direction", "dependents"]
    answer = subprocess.run([*command, "src", "tests"], cwd=ROOT, capture_output=True, check=True)
    importers: dict[str, list[str]] = json.loads(answer.stdout)
    touched = changed | {test for file in changed for test in importers.get(file, [])}
    tests = {
        file
        for file in touched
        if file.startswith(("tests/unit/", "tests/engine/"))
        and Path(file).name.startswith("test_")
        and (ROOT / file).exists()
    }
    return [*ALWAYS, *sorted(tests)]


def upstream() -> str:
    """Return the commit from which this branch departed; HEAD where nothing is known of one."""
    found = subprocess.run(
        ["git", "merge-base", "HEAD", "@{upstream}"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "HEAD"


def git(*arguments: str) -> str:
    """Return what git prints."""
    answer = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
