"""Ranks that train beside each other are reported once; scripts that communicate rarely are not."""

from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.launcher.hang_monitor import UnconnectedRanks


def heartbeats(step: int | None, **facts: object) -> list[Heartbeat]:
    ranks = []
    for rank in range(2):
        ranks.append(Heartbeat(rank=rank, pid=rank, beat=1, moves=1, step=step, **facts))  # type: ignore[arg-type]
    return ranks


def test_two_ranks_with_steps_and_without_a_process_group_are_reported_once() -> None:
    watch = UnconnectedRanks()
    assert watch.hear(heartbeats(3)) is None
    finding = watch.hear(heartbeats(30))
    assert finding is not None
    assert finding.name == "ranks-not-connected"
    assert watch.hear(heartbeats(60)) is None


def test_one_rank_alone_is_not_reported() -> None:
    assert UnconnectedRanks().hear(heartbeats(100)[:1]) is None


def test_ranks_with_a_process_group_have_more_time_for_their_first_collective() -> None:
    watch = UnconnectedRanks()
    assert watch.hear(heartbeats(40, groups=("0",), collectives=0)) is None
    assert watch.hear(heartbeats(60, groups=("0",), collectives=0)) is not None


def test_one_collective_is_enough_however_rarely_a_script_communicates() -> None:
    watch = UnconnectedRanks()
    assert watch.hear(heartbeats(1, groups=("0",), collectives=1)) is None
    assert watch.hear(heartbeats(1000)) is None  # its group was destroyed


def test_ranks_whose_collectives_are_not_visible_are_not_reported() -> None:
    assert UnconnectedRanks().hear(heartbeats(1000, groups=("0",))) is None


def test_a_script_without_known_steps_is_not_reported() -> None:
    watch = UnconnectedRanks()
    for _ in range(100):
        assert watch.hear(heartbeats(None)) is None
