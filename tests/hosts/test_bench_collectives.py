"""``muster bench collectives --hosts``: ranks on machines that share no files, measured over ssh."""

import json

import pytest

from hosts.lab import Lab
from hosts.launching import leftovers
from muster_command import muster_argv

pytestmark = pytest.mark.nightly


def test_ranks_of_two_machines_are_timed_and_named(lab2: Lab) -> None:
    work = lab2.folder / "work"
    work.mkdir()
    words = [
        *("bench", "collectives", "--hosts", "node1,node2", "--device", "cpu", "--json"),
        *("--operations", "all-reduce,send-receive", "--largest", "16KiB", "--rounds", "3"),
    ]
    done = lab2.hosts[0].run(muster_argv(words), cwd=work)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["record"]["settings"]["hosts"] == ["node1", "node2"]
    assert told["record"]["facts"]["values_wrong"] == 0
    assert set(told["record"]["facts"]["lines"]) == {"all-reduce", "send-receive"}
    assert "2 of 2 joined" in done.stderr
    assert leftovers(lab2) == {}
