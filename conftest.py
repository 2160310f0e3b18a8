"""What all tests share: leak guards, the rule about skips, the NVML stand-in, code in documents."""

import signal
from collections.abc import Generator

import pytest

pytest_plugins = ["leak_guard", "muster_command", "document_examples", "side_by_side"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failed test (CI)")


def pytest_configure() -> None:
    # A shell starts background jobs deaf to Ctrl-C, and so would be everything that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which --no-skips forbids: {report.longrepr}"
    return report
