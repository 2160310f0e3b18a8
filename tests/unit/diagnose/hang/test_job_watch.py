"""Who keeps whom waiting, from looks at the ranks second by second; healthy jobs are not accused."""

from collections.abc import Callable

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.diagnose.hang import report
from torchmuster.diagnose.hang.job_watch import JobWatch, SeenRank
from torchmuster.diagnose.hang.rank_processes import RankProcess
from torchmuster.diagnose.hang.rank_stacks import RankSnapshot, WorkerSnapshot
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status

HOSTS = ("a", "a", "b", "b")
Facts = dict[str, object]

WAITS: Facts = {
    "doing": "all_reduce",
    "place": "train.py:88 in step",
    "source": "dist.all_reduce(total)",
    "stack": ("all_reduce (torch/distributed/distributed_c10d.py:3252)", "step (train.py:88)"),
    "waiting": True,
}
SLEEPS: Facts = {
    "doing": "time.sleep",
    "place": "data.py:41 in load",
    "source": "time.sleep(600)",
    "stack": ("load (data.py:41)", "main (train.py:7)"),
}
BUSY: Facts = {"doing": "inv", "place": "train.py:5", "stack": ("main (train.py:5)",), "busy": 1.0}


def process(rank: int, world_size: int, **facts: object) -> RankProcess:
    known: Facts = {
        "job": "a:29500",
        "local_rank": rank % 2,
        "local_world_size": 2,
        "pid": 100 + rank,
        "command": "python train.py",
        "started_unix_s": 0.0,
        "related": (),
    }
    return RankProcess(rank=rank, world_size=world_size, **(known | facts))  # type: ignore[arg-type]


class Job:
    """A job whose ranks are looked at once a second; ``facts(second, rank)`` are what a look shows."""

    def __init__(self, seen: list[int], *, world_size: int = 4, **facts: object) -> None:
        self.now_s = 0.0
        ranks = [
            SeenRank(host=HOSTS[rank], process=process(rank, world_size, **facts)) for rank in seen
        ]
        self.watch = JobWatch(ranks, clock=lambda: self.now_s)

    def live(self, facts: Callable[[int, int], Facts], seconds: int = 90) -> Finding:
        """Take snapshots until there is a hang, the ranks move, or the time is over; return the conclusion."""
        for second in range(1, seconds + 1):
            self.now_s = float(second)
            for host in self.watch.hosts:
                own = [rank for rank in self.watch.ranks if rank.host == host]
                shown = [snapshot_of(one.process.pid, **facts(second, one.rank)) for one in own]
                self.watch.add(host, shown)
            if self.watch.judge() or self.watch.moving or self.watch.exited:
                break
        return report.conclusion(self.watch, self.now_s)


def snapshot_of(pid: int, **facts: object) -> RankSnapshot:
    known: Facts = {"state": "S", "thread": pid, "wakeups": (5, 5, 5)}
    return RankSnapshot(pid=pid, **(known | facts))  # type: ignore[arg-type]


def awake(second: int) -> tuple[int, int, int]:
    """Return the counts of a thread that runs between all looks."""
    return (second * 9, second * 9 + 3, second * 9 + 4)


def one_against_all(culprit: int, facts: Facts) -> Callable[[int, int], Facts]:
    return lambda _, rank: facts if rank == culprit else WAITS


def test_the_rank_that_differs_is_named_with_its_line_and_source(
    snapshot: SnapshotAssertion,
) -> None:
    job = Job([0, 1, 2, 3])
    told = job.live(one_against_all(3, SLEEPS))
    assert (told.name, told.status) == ("rank-elsewhere", Status.FAILURE)
    assert told.what.startswith("rank 3 on b ")
    assert 20 <= job.now_s <= 22
    assert told == snapshot


def test_a_loader_worker_is_named_with_its_own_line(snapshot: SnapshotAssertion) -> None:
    worker = WorkerSnapshot(
        pid=900, place="data.py:41 in load", doing="time.sleep", stack=("load (data.py:41)",)
    )
    loads: Facts = {"doing": "DataLoader.__next__", "place": "train.py:7", "workers": (worker,)}
    job = Job([0, 1], world_size=2)
    told = job.live(one_against_all(1, {**loads, "phase": "loading data"}))
    assert told.name == "rank-elsewhere"
    assert "data.py:41 in load" in told.what
    assert told == snapshot


@pytest.mark.parametrize(
    ("name", "facts", "at_s"),
    [
        pytest.param("rank-stopped", {**SLEEPS, "state": "T"}, (3, 6), id="stopped"),
        pytest.param("rank-exited", {"state": "X"}, (5, 8), id="exited"),
        pytest.param("rank-elsewhere", {**SLEEPS, "state": "D"}, (20, 23), id="in the kernel"),
        pytest.param("rank-elsewhere", BUSY, (60, 63), id="busy"),
        pytest.param(
            "collectives-differ", {**WAITS, "doing": "barrier"}, (20, 23), id="other call"
        ),
        pytest.param("collectives-differ", {**WAITS, "place": "a.py:9"}, (20, 23), id="other line"),
        pytest.param("collective-does-not-end", WAITS, (60, 63), id="all wait"),
    ],
)
def test_each_kind_of_hang_has_its_name_and_its_time(
    name: str, facts: Facts, at_s: tuple[float, float], snapshot: SnapshotAssertion
) -> None:
    job = Job([0, 1, 2, 3])
    told = job.live(one_against_all(1, facts))
    assert (told.name, told.status) == (name, Status.FAILURE)
    assert at_s[0] <= job.now_s <= at_s[1]
    assert told.what == snapshot


def test_a_rank_that_looks_for_something_again_and_again_does_not_move() -> None:
    def polls(second: int, rank: int) -> Facts:
        return {**SLEEPS, "wakeups": awake(second)} if rank == 1 else WAITS

    job = Job([0, 1])
    told = job.live(polls)
    assert told.name == "rank-elsewhere"


def test_ranks_that_wait_for_hosts_that_were_not_looked_at(snapshot: SnapshotAssertion) -> None:
    job = Job([0, 1])
    told = job.live(lambda *_: WAITS)
    assert told.name == "collective-does-not-end"
    assert "ranks 2-3" in told.what
    assert told == snapshot


# ---- healthy


def steps(second: int, rank: int) -> Facts:
    return {
        **WAITS,
        "wakeups": awake(second),
        "stack": (f"step (train.py:{80 + (second + rank) % 3})",),
    }


def slow_steps(second: int, rank: int) -> Facts:
    """Rank 1 needs 11 s for its part of a step, asleep; rank 0 wakes up after each."""
    count = second // 11
    if rank == 1:
        return {**SLEEPS, "wakeups": (count, count, count)}
    return {**WAITS, "wakeups": (count, count, count)}


def same_line(second: int, rank: int) -> Facts:
    """All are always seen in the same collective, which they call again and again."""
    return {**WAITS, "wakeups": awake(second)}


@pytest.mark.parametrize("facts", [steps, slow_steps, same_line, lambda *_: BUSY])
def test_ranks_that_move_are_not_accused(facts: Callable[[int, int], Facts]) -> None:
    job = Job([0, 1], world_size=2)
    told = job.live(facts)
    assert (told.name, told.status) == ("ranks-move", Status.OK)


def test_ranks_that_all_sleep_are_neither_accused_nor_cleared() -> None:
    job = Job([0, 1], world_size=2)
    told = job.live(lambda *_: SLEEPS)
    assert (told.name, told.status) == ("hang-not-certain", Status.NOTE)
    assert "ranks 0-1" in told.what


def test_a_stack_that_cannot_be_read_is_no_evidence() -> None:
    problem: Facts = {"problem": "py-spy: Failed to find python version from target process"}
    job = Job([0, 1], world_size=2)
    with pytest.raises(Impossible) as raised:
        job.live(one_against_all(1, problem))
    assert raised.value.what.endswith("rank 1")
    assert "py-spy dump --pid 101" in raised.value.fix
    late = Job([0, 1], world_size=2)  # one failed attempt does not matter
    result = late.live(lambda second, rank: problem if second == 5 else [WAITS, SLEEPS][rank])
    assert result.name == "rank-elsewhere"


# ---- notes about GPUs
