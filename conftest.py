"""What all tests share: plugins, marks that follow from others, the rule about skips."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = [
    "leak_guard",
    "muster_command",
    "document_examples",
    "rank_group",
    "text_snapshots",
]


# Their blocks train for minutes.
_NIGHTLY_DOCUMENTS = ("train.md",)
# Folders whose tests wait for processes: the minutes-long files of few tests run first, so that no
# worker of pytest-xdist is left alone with one of them at the end.
_SLOW_FOLDERS = ("hosts", "pods", "slurm", "prometheus", "ranks", "docs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failed test (CI)")


def pytest_configure() -> None:
    _draw_the_same_every_time()
    # Set by readline in the process that starts the workers of pytest-xdist.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    # A shell starts background jobs deaf to Ctrl-C, and so would be everything that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _draw_the_same_every_time() -> None:
    """In CI a property is tried with the same examples at every run; HYPOTHESIS_RANDOM=1 draws others."""
    random = bool(os.environ.get("HYPOTHESIS_RANDOM"))
    hypothesis.settings.register_profile("random", deadline=None)
    hypothesis.settings.register_profile(
        "same",
        derandomize=True,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("same" if "CI" in os.environ and not random else "random")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("stress") or item.path.name in _NIGHTLY_DOCUMENTS:
            item.add_marker("nightly")
        if "quiet_transformers" in getattr(item, "fixturenames", ()):
            item.add_marker("integrations")
    items.sort(key=_is_quick)  # stable: the order within a file stays


def _is_quick(item: pytest.Item) -> bool:
    """Return whether a test is outside of the folders whose tests wait for processes."""
    folders = item.path.relative_to(item.config.rootpath).parts
    return not set(_SLOW_FOLDERS) & set(folders[:2])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which --no-skips forbids: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that failed and then passed when they ran again, and keep the list in build/flaky.txt."""
    rerun = {report.nodeid for report in terminalreporter.stats.get("rerun", [])}
    failed = {report.nodeid for report in terminalreporter.stats.get("failed", [])}
    flaky = sorted(rerun - failed)
    if not flaky or hasattr(terminalreporter.config, "workerinput"):
        return
    terminalreporter.section("flaky: failed, then passed")
    with Path("build", "flaky.txt").open("a", encoding="utf-8") as file:
        for test in flaky:
            terminalreporter.line(test)
            file.write(f"{test}\n")
