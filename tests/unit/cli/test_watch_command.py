"""``muster watch`` writes a page to a file."""

from pathlib import Path

import pytest

from made_up_runs import a_run, add_lines
from muster_command import Muster

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(own_machine: Path) -> Path:
    run = a_run(own_machine, phase="finished", headline="finished")
    add_lines(run)
    return own_machine


def test_without_a_terminal_it_is_printed_once(muster: Muster, folder: Path) -> None:
    done = muster("watch", "last")
    assert done.code == 0
    assert "step 100" in done.out


def test_a_report_of_an_older_run(muster: Muster, folder: Path) -> None:
    done = muster("watch", "last", "--report", "old.html")
    assert (done.code, done.err.splitlines()[1:]) == (0, ["muster: report in old.html"])
    assert "100 steps, loss 1," in (folder / "old.html").read_text()
    done = muster("watch", "last", "--report", "nowhere/old.html")
    assert done.code == 2
    assert "nowhere/old.html" in done.err
