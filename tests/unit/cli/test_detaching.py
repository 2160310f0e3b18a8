"""A launcher that goes on without its terminal: whoever leaves it is told how to find it again."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchmuster.cli.launching import detach
from torchmuster.errors import ExitCode
from torchmuster.runfolder import create_run_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The processes that were forked; a Ctrl-C comes with each fork. They are ended and waited for."""
    fork, forked = os.fork, []

    def fork_and_interrupt() -> int:
        if child := fork():
            forked.append(child)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return child

    monkeypatch.setattr(os, "fork", fork_and_interrupt)
    yield forked
    for child in forked:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_who_leaves_at_once_is_told_as_well(
    tmp_path: Path,
    children: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = create_run_folder(tmp_path, "left")

    def work() -> int:
        signal.pause()
        return 0

    try:
        code = detach(run, work)
    except KeyboardInterrupt:
        pytest.fail("nobody was told that the run goes on")
    assert code == ExitCode.GOOD
    assert len(children) == 1
    told = capsys.readouterr()
    assert told.out == f"{run.id}\n"
    assert f"muster logs {run.path} -f" in told.err
    assert f"muster stop {run.path}" in told.err
