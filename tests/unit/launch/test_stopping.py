"""What is printed while ranks are asked to stop, and about those that had to be killed."""

from types import SimpleNamespace
from typing import Any

from syrupy.assertion import SnapshotAssertion

from torchmuster.finding import Status
from torchmuster.launch import protocol
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.launcher.stopping import killed_after_request, waiting_text


def node(
    name: str, *ranks: int, left_s: float = 20.0, killed: tuple[int, ...] | None = None
) -> Any:
    """Return a host on which these ranks are alive, or one that has stopped after killing some."""
    ended = None if killed is None else protocol.Ended(attempt=0, good=False, killed=killed)
    heartbeats = tuple(
        Heartbeat(rank=rank, pid=9, beat=1, moves=1, doing="barrier", place="train.py:7")
        for rank in (killed or ranks)
    )
    stopping = protocol.Stopping(ranks=ranks, left_s=left_s) if ranks else None
    return SimpleNamespace(
        name=name,
        ended=ended,
        is_lost=False,
        heartbeats=heartbeats,
        stopping=stopping,
        stopping_s=100.0,
    )


def test_the_ranks_that_are_waited_for_and_the_time_they_have_left_are_shown(
    snapshot: SnapshotAssertion,
) -> None:
    nodes = [node("a", 0, 1), node("b", 3, left_s=24.0), node("c", killed=())]
    assert waiting_text(nodes, 101.0) == snapshot
    assert ": 23 s left" in waiting_text(nodes, 101.0)
    assert ": 0 s left" in waiting_text(nodes, 200.0)
    assert waiting_text([node("a")], 101.0) == snapshot
    assert waiting_text([node("a", killed=())], 101.0) == ""


def test_killed_ranks_are_named_with_what_they_did_and_how_to_give_them_more_time(
    snapshot: SnapshotAssertion,
) -> None:
    nodes = [node("a", killed=()), node("b", killed=(2, 3))]
    killed = killed_after_request(nodes, grace_s=30.0, at_once=False)
    assert killed is not None
    assert (killed.ranks, killed.at_once) == ((2, 3), False)
    assert (killed.finding.name, killed.finding.status) == ("ranks-killed", Status.WARNING)
    assert killed.finding == snapshot
    by_the_user = killed_after_request(nodes, grace_s=30.0, at_once=True)
    assert by_the_user is not None
    assert by_the_user.finding == snapshot
    assert killed_after_request(nodes[:1], grace_s=30.0, at_once=False) is None
