"""``muster watch`` as a page, and the page that is written to a file."""

import json
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_runs import a_run, add_lines
from muster_command import Muster, muster_argv
from patience import GIVE_UP_S

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(own_machine: Path) -> Path:
    run = a_run(own_machine, phase="finished", headline="finished")
    add_lines(run)
    return own_machine


@contextmanager
def _browsing(folder: Path, *words: str) -> Iterator[str]:
    """Start the command; give the address that it prints; end it as people do, and look how it ended."""
    line = muster_argv(["watch", "last", "--browser", *words])
    with subprocess.Popen(
        line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            yield address
            process.send_signal(signal.SIGINT)
            rest, said = process.communicate(timeout=GIVE_UP_S)
            assert (process.returncode, rest) == (0, ""), said
            assert "open this in a browser" in said
        finally:
            process.kill()


def test_a_run_in_the_browser(folder: Path) -> None:
    with _browsing(folder) as address:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        with urllib.request.urlopen(f"{address}picture", timeout=GIVE_UP_S) as answer:
            told = json.load(answer)
        assert told["over"] is True
        assert "100" in told["parts"]["tiles"]


def test_with_a_token_the_address_has_it_where_no_server_sees_it(folder: Path) -> None:
    token = folder / "token"
    token.write_text("a word of more/than 16 letters\n")
    token.chmod(0o600)
    with _browsing(folder, "--token-file", "token") as address:
        page, _, given = address.partition("#")
        assert given == "a%20word%20of%20more%2Fthan%2016%20letters"
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(f"{page}picture", timeout=GIVE_UP_S)
        refused.value.close()


def test_others_are_served_by_tls_only(
    muster: Muster, folder: Path, snapshot: SnapshotAssertion
) -> None:
    done = muster("watch", "last", "--browser", "--bind", "0.0.0.0")
    assert done.code == 2
    assert "0.0.0.0" in done.err
    assert done.err == snapshot


def test_a_report_of_an_older_run(
    muster: Muster, folder: Path, snapshot: SnapshotAssertion
) -> None:
    done = muster("watch", "last", "--report", "old.html")
    assert (done.code, done.err.splitlines()[1:]) == (0, ["muster: report in old.html"])
    assert "100 steps, loss 1," in (folder / "old.html").read_text()
    done = muster("watch", "last", "--report", "nowhere/old.html")
    assert done.code == 2
    assert "nowhere/old.html" in done.err
    assert done.err == snapshot
