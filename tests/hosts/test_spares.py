"""``--spares``: a spare takes the place of a host that dies, and the run continues as if nothing had happened."""

import re
from pathlib import Path

import pytest

from hosts.killing import Run
from hosts.lab import Lab
from hosts.launching import PATIENT
from hosts.namespaces import await_true
from hosts.spare_training import WHERE, Training, events, kill_host, log_of
from torchmuster.launch.history.run_state import SPARE_READY, TAKEOVER

TWO_AND_ONE = ["--hosts", "node1,node2,node3", "--spares", "1", *PATIENT]


def test_a_spare_takes_the_rank_of_a_host_that_dies(lab3: Lab, tmp_path: Path) -> None:
    run = Run.launch(lab3, tmp_path, WHERE, options=TWO_AND_ONE)
    run.wait_for_ranks("round 0: rank", ranks=2)
    kill_host(lab3, "node2")
    run.wait_for_ranks("round 1: rank", ranks=2)
    assert "round 1: rank 0 on node1" in log_of(tmp_path, 0)
    assert "round 1: rank 1 on node3" in log_of(tmp_path, 1)
    (taken,) = events(tmp_path, TAKEOVER)
    assert (taken["host"], taken["spare"], taken["ranks"]) == ("node2", "node3", [1, 1])
    (tmp_path / "end").touch()
    assert run.transcript.end() == 0
    run.wait_until_clean()
    said = run.transcript.text("err")
    # Nobody but the lost host was connected or tested again.
    assert len(re.findall("rendezvous at", said)) == 1
    assert not re.search(r"\d of \d joined", said)


@pytest.mark.nightly
def test_a_host_that_died_becomes_a_spare_and_the_head_can_be_replaced(
    lab4: Lab, tmp_path: Path
) -> None:
    options = ["--hosts", "node2,node3,node4", "--spares", "1", *PATIENT]
    run = Run.launch(lab4, tmp_path, WHERE, options=options)
    run.wait_for_ranks("round 0: rank", ranks=2)
    kill_host(lab4, "node2")
    run.wait_for_ranks("round 1: rank", ranks=2)
    assert "round 1: rank 0 on node4" in log_of(tmp_path, 0)

    def is_spare() -> bool:
        return any(one["host"] == "node2" for one in events(tmp_path, SPARE_READY))

    await_true("node2 is a spare", is_spare)
    kill_host(lab4, "node3")
    run.wait_for_ranks("round 2: rank", ranks=2)
    assert "round 2: rank 1 on node2" in log_of(tmp_path, 1)
    (tmp_path / "end").touch()
    assert run.transcript.end() == 0
    run.wait_until_clean()


@pytest.mark.nightly
def test_training_with_kills_is_bitwise_equal_to_an_undisturbed_one(
    lab4: Lab, tmp_path: Path
) -> None:
    hosts = ["node2", "node3", "node4"]
    whole = Training(lab4, tmp_path / "whole", hosts, spares=1, steps=12)
    expected = whole.run_to_the_end()
    killed = Training(lab4, tmp_path / "killed", hosts, spares=1, steps=12)
    assert killed.run_to_the_end(kills=[(4, 0)], await_spare=False) == expected
    (taken,) = killed.takeovers()
    assert (taken["host"], taken["spare"]) == ("node2", "node4")
