"""The guard on every test is itself tested: each kind of leak is caught and named."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = Path(__file__).resolve().parent.parent

LEAKS = {
    "environment changed: LEFT_BEHIND": "import os; os.environ['LEFT_BEHIND'] = '1'",
    "threads left running: lost": (
        "import threading; threading.Thread("
        "target=threading.Event().wait, args=(60,), name='lost', daemon=True).start()"
    ),
    "processes left running": (
        "import subprocess, sys; kept.append("
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']))"
    ),
    "files left open": "kept.append(open(__file__))",
    "files left in the working folder: litter": "open('litter', 'w').close()",
}


@pytest.mark.parametrize("message", LEAKS)
def test_a_leak_is_caught_and_named(
    pytester: pytest.Pytester, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # nobody waits for long there
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); pytest_plugins = ['leak_guard']"
    )
    pytester.makepyfile(f"kept = []\ndef test_leaky():\n    {LEAKS[message]}\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*the test left something behind: *{message}*"])


def test_a_clean_test_passes(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); pytest_plugins = ['leak_guard']"
    )
    pytester.makepyfile("def test_clean(tmp_path):\n    (tmp_path / 'x').write_text('')\n")
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("flags", "outcome"),
    [([], "skipped"), (["--no-skips"], "failed"), (["--no-skips", "-n", "1"], "failed")],
)
def test_a_skip_is_a_failure_where_skips_are_forbidden(
    pytester: pytest.Pytester, flags: list[str], outcome: str
) -> None:
    root = (TESTS.parent / "conftest.py").read_text()
    pytester.makeconftest(f"{root}\npytest_plugins = []\n")
    pytester.makepyfile("import pytest\ndef test_skipped():\n    pytest.skip('no server here')\n")
    result = pytester.runpytest_subprocess(*flags, "-p", "no:cacheprovider")
    result.assert_outcomes(**{outcome: 1})
