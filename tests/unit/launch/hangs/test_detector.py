"""Who keeps whom waiting: judged from made-up heartbeats, second by second; healthy runs raise no alarm."""

from collections.abc import Callable, Iterable

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs import messages
from torchmuster.launch.hangs.detector import HangWatch
from torchmuster.launch.hangs.heartbeat import Heartbeat, PendingCollective
from torchmuster.launch.hangs.observation import Hang

HOSTS = ("a", "a", "b", "b")


class Ranks:
    """Ranks whose heartbeats are made up; ``moment(second, rank)`` gives what changes."""

    def __init__(self, count: int = 2, devices: dict[int, str] | None = None) -> None:
        self.now_s = 0.0
        self.watch = HangWatch(lambda: self.now_s)
        self.devices = devices or {}
        self.count = count

    def live(
        self, seconds: float, doing: Callable[[int], dict[str, object]], *, every_s: float = 2.0
    ) -> list[tuple[float, Finding]]:
        """Let time pass, with all ranks doing this; return what was said, and when."""
        said = []
        end = self.now_s + seconds
        while self.now_s < end:
            self.now_s += every_s
            for host in dict.fromkeys(HOSTS[: self.count]):
                own = [rank for rank in range(self.count) if HOSTS[rank] == host]
                self.watch.hear(host, [heartbeat(rank, self.now_s, **doing(rank)) for rank in own])
            if finding := self.watch.news(self.devices):
                said.append((self.now_s, finding))
        return said


def heartbeat(rank: int, now_s: float, **facts: object) -> Heartbeat:
    known: dict[str, object] = {
        "pid": 100 + rank,
        "beat": int(now_s),
        "moves": 40,
        "place": "train.py:20 in step",
        "begun": {"0": 40},
        "state": "S",
        "busy": 0.01,
    }
    return Heartbeat(rank=rank, **(known | facts))  # type: ignore[arg-type]


def called(
    op: str = "all_reduce", number: int = 41, shapes: str = "[8]", group: str = "0"
) -> PendingCollective:
    return PendingCollective(group=group, number=number, operation=op, shapes=shapes, dtype="Float")


WAITING: dict[str, object] = {"doing": "all_reduce", "waiting": True, "waits": (called(),)}
ASLEEP: dict[str, object] = {"doing": "time.sleep", "place": "train.py:88 in step"}


def one_against_all(culprit: int, facts: dict[str, object]) -> Callable[[int], dict[str, object]]:
    return lambda rank: facts if rank == culprit else WAITING


def only(said: Iterable[tuple[float, Finding]]) -> tuple[float, Finding]:
    (told,) = said
    assert told[1].name in {*messages.NAMES.values(), "hang-over"}
    return told


def test_a_rank_asleep_in_the_loader_is_named_with_host_device_place_step_and_who_waits(
    snapshot: SnapshotAssertion,
) -> None:
    ranks = Ranks(4, devices={3: "GPU 1"})
    facts = {
        "doing": "DataLoader.__next__",
        "place": "train.py:88 in epoch",
        "phase": "loading data",
        "step": 120,
    }
    at_s, told = only(ranks.live(20, one_against_all(3, facts)))
    assert 12 <= at_s <= 16
    assert (told.name, told.status) == ("rank-elsewhere", Status.WARNING)
    assert told.what.startswith("rank 3 on b (GPU 1) ")
    assert told.as_json() == snapshot


@pytest.mark.parametrize(
    ("name", "facts", "within_s", "fix"),
    [
        pytest.param("rank-elsewhere", ASLEEP, 16, "train.py:88 in step", id="asleep"),
        pytest.param("rank-elsewhere", {"doing": ""}, 16, "train.py:20", id="own code"),
        pytest.param("rank-stopped", {"state": "T"}, 8, "kill -CONT 101", id="stopped"),
        pytest.param("rank-elsewhere", {"state": "D"}, 20, "cat /proc/101/stack", id="disk"),
        pytest.param(
            "rank-elsewhere",
            {"silent_s": 9.0, "doing": "tokenize"},
            16,
            "stacks",
            id="native code",
        ),
    ],
)
def test_each_way_of_standing_still_has_its_words(
    name: str, facts: dict[str, object], within_s: float, fix: str, snapshot: SnapshotAssertion
) -> None:
    _, told = only(Ranks().live(within_s, one_against_all(1, facts)))
    assert told.name == name
    assert told.what.startswith("rank 1 on a ")
    assert fix in told.fix
    assert told.as_json() == snapshot


def test_a_rank_that_has_ended_keeps_the_others_waiting(snapshot: SnapshotAssertion) -> None:
    ranks = Ranks()
    assert ranks.live(4, lambda _: WAITING | {"waits": (), "moves": 1}) == []
    _, told = only(ranks.live(10, one_against_all(1, {"state": "X"})))
    assert told.name == "rank-exited"
    assert told.what.startswith("rank 1 on a ")
    assert told.as_json() == snapshot


def test_a_rank_that_spins_on_a_gpu_s_result_waits_if_somebody_has_not_come(
    snapshot: SnapshotAssertion,
) -> None:
    """It keeps a processor busy, and is in no function that waits for others."""
    spins: dict[str, object] = {"doing": "loss.item", "busy": 1.0, "state": "R"}
    ahead = spins | {"waits": (called(),), "begun": {"0": 41}}
    _, told = only(Ranks().live(16, lambda rank: ASLEEP if rank else ahead))
    assert told.name == "rank-elsewhere"
    assert told.what.startswith("rank 1 on a ")
    assert told.what == snapshot
    ranks = Ranks()
    assert ranks.live(298, lambda rank: spins if rank else ahead) == []
    _, told = only(ranks.live(10, lambda rank: spins if rank else ahead))
    assert told.name == "rank-elsewhere"
    assert told.what.startswith("rank 1 on a ")
    assert told.what == snapshot
    assert Ranks().live(400, lambda rank: spins | {"begun": {"0": 41}} if rank else ahead) == []


def test_ranks_that_spin_in_different_collectives_are_told_too() -> None:
    calls = [called("all_reduce"), called("barrier", shapes="")]
    spins: dict[str, object] = {"doing": "loss.item", "busy": 1.0, "state": "R"}
    _, told = only(Ranks().live(8, lambda rank: spins | {"waits": (calls[rank],)}))
    assert told.name == "collectives-differ"


def in_a_pair(*others: dict[str, object]) -> Callable[[int], dict[str, object]]:
    """Let rank 0 wait in the group of ranks 0 and 1, and others do as they like."""
    waits = WAITING | {"waits": (called(group="pair", number=3),), "begun": {"0": 40, "pair": 3}}
    return lambda rank: others[rank - 1] if rank else waits


IN_THE_PAIR: dict[str, object] = {"groups": ("0", "pair"), "begun": {}}
NOT_IN_IT: dict[str, object] = {"groups": ("0",), "begun": {}}
AT_WORK: dict[str, object] = {"doing": "matmul", "busy": 1.0, "state": "R"}


@pytest.mark.parametrize("facts", [ASLEEP, {"state": "X"}], ids=["asleep", "ended"])
def test_who_is_not_in_the_group_that_is_waited_in_is_not_blamed(facts: dict[str, object]) -> None:
    ranks = Ranks(3)
    doing = in_a_pair(AT_WORK | IN_THE_PAIR, facts | NOT_IN_IT)
    assert ranks.live(58, doing) == []
    _, told = only(ranks.live(8, doing))
    assert told.name == "rank-elsewhere"
    assert told.what.startswith("rank 1 on a ")
    _, told = only(Ranks(3).live(16, in_a_pair(ASLEEP | IN_THE_PAIR, facts | NOT_IN_IT)))
    assert told.name == "rank-elsewhere"
    assert told.what.startswith("rank 1 on a ")


def test_where_all_of_a_group_wait_in_it_the_others_are_told_of_after_a_minute() -> None:
    ranks = Ranks(3)
    waits = in_a_pair()(0)
    doing = in_a_pair(waits, ASLEEP | NOT_IN_IT)
    assert ranks.live(58, doing) == []
    _, told = only(ranks.live(8, doing))
    assert told.name == "rank-elsewhere"
    assert told.what.startswith("rank 2 on b ")


def test_where_processes_cannot_be_seen_none_is_taken_for_ended_or_asleep() -> None:
    unseen: dict[str, object] = {"state": "", "busy": None}
    assert Ranks().live(50, one_against_all(1, ASLEEP | unseen)) == []


def test_a_stopped_process_is_told_although_nobody_waits_yet(snapshot: SnapshotAssertion) -> None:
    _, told = only(Ranks().live(6, lambda rank: {"state": "T"} if rank else {"moves": 3}))
    assert told.name == "rank-stopped"
    assert told.what == snapshot


def test_a_rank_at_work_has_a_minute(snapshot: SnapshotAssertion) -> None:
    compiling: dict[str, object] = {"busy": 1.0, "state": "R", "doing": "compile"}
    ranks = Ranks()
    assert ranks.live(58, one_against_all(1, compiling)) == []
    at_s, told = only(ranks.live(10, one_against_all(1, compiling)))
    assert at_s < 66
    assert told.name == "rank-elsewhere"
    assert told.what.startswith("rank 1 on a ")
    assert "torchmuster.train.world.rank_zero_first()" in told.fix
    assert told.as_json() == snapshot


def test_a_rank_that_moves_but_hardly_computes_has_a_minute_too() -> None:
    ranks = Ranks()
    said = ranks.live(
        70, lambda rank: {"place": f"evaluate.py:{ranks.now_s:.0f}"} if rank else WAITING
    )
    at_s, told = only(said)
    assert 60 <= at_s <= 64
    assert told.name == "rank-elsewhere"
    assert told.what.startswith("rank 1 on a ")


def test_a_rank_that_looks_again_and_again_whether_something_has_come_is_asleep() -> None:
    ranks = Ranks()
    lines = ["wait.py:3", "wait.py:4", "wait.py:3", "wait.py:5"]
    said = ranks.live(
        22, lambda rank: {"place": lines[int(ranks.now_s) // 2 % 4]} if rank else WAITING
    )
    at_s, _ = only(said)
    assert at_s <= 22


def test_a_waiting_rank_that_moves_hides_no_hang() -> None:
    ranks = Ranks(3)

    def doing(rank: int) -> dict[str, object]:
        polls = WAITING | {"place": f"wait.py:{ranks.now_s:.0f}"}
        return (WAITING, polls, ASLEEP)[rank]

    _, told = only(ranks.live(16, doing))
    assert told.what.startswith("rank 2 on b ")


def test_where_nothing_is_known_of_moves_every_other_place_is_a_move() -> None:
    ranks = Ranks()
    lines = ["train.py:3", "train.py:4", "train.py:5"]

    def doing(rank: int) -> dict[str, object]:
        line = {"moves": 1, "place": lines[int(ranks.now_s) // 2 % 3]}
        return line if rank else line | {"doing": "all_reduce", "waiting": True}

    assert ranks.live(200, doing) == []


def test_healthy_ranks_that_are_found_in_a_collective_each_time_do_not_hang() -> None:
    unseen: dict[str, object] = {"doing": "all_reduce", "waiting": True, "moves": 1, "begun": {}}
    assert Ranks().live(200, lambda _: unseen) == []


def test_ranks_that_wait_without_visible_collectives_are_reported_after_five_minutes() -> None:
    unseen: dict[str, object] = {"doing": "all_reduce", "waiting": True, "moves": 1, "begun": {}}
    at_s, told = only(Ranks().live(310, lambda _: unseen))
    assert 300 <= at_s <= 304
    assert told.name == "collective-does-not-end"
    assert "not visible" in told.why


@pytest.mark.parametrize("phase", ["saving", "evaluating", "compiling"])
def test_what_one_rank_does_for_all_may_take_a_minute(phase: str) -> None:
    ranks = Ranks()
    assert ranks.live(58, one_against_all(1, {"phase": phase, "doing": "write"})) == []
    assert len(ranks.live(10, one_against_all(1, {"phase": phase, "doing": "write"}))) == 1


def test_a_rank_that_gets_no_processor_is_not_asleep() -> None:
    starved: dict[str, object] = {"busy": 0.02, "state": "R", "doing": "compile"}
    assert Ranks().live(50, one_against_all(1, starved)) == []


def test_at_the_beginning_a_sleeper_has_longer() -> None:
    new: dict[str, object] = {"begun": {"0": 3}}
    waiting = WAITING | new | {"waits": (called(number=4),)}
    ranks = Ranks()
    assert ranks.live(18, lambda rank: ASLEEP | new if rank else waiting) == []
    at_s, _ = only(ranks.live(6, lambda rank: ASLEEP | new if rank else waiting))
    assert at_s <= 22


@pytest.mark.parametrize(
    "doing",
    [
        pytest.param(lambda _: ASLEEP, id="all sleep"),
        pytest.param(lambda _: {"busy": 1.0, "state": "R"}, id="all compile"),
        pytest.param(lambda _: {"doing": "DataLoader.__next__"}, id="all load"),
        pytest.param(
            lambda rank: {"busy": 0.9, "waits": (called(),)} if rank else {"busy": 0.9},
            id="one has a collective under way while it computes",
        ),
    ],
)
def test_ranks_of_which_none_waits_do_not_hang(doing: Callable[[int], dict[str, object]]) -> None:
    assert Ranks().live(200, doing) == []


def test_ranks_that_take_long_to_end_do_not_hang() -> None:
    """What they said last, that one waits for the other, is no longer so."""
    leaving: dict[str, object] = {"silent_s": 9.0, "beat": 3}
    assert Ranks().live(100, lambda rank: (ASLEEP if rank else WAITING) | leaving) == []


def test_waits_that_end_are_no_hang() -> None:
    ranks = Ranks()
    for step in range(20):
        moves: dict[str, object] = {"moves": step}
        slow = WAITING | moves
        assert ranks.live(8, lambda rank: ASLEEP | moves if rank else slow) == []  # noqa: B023
        assert ranks.live(2, lambda _: slow) == []  # noqa: B023


def test_what_the_ranks_called_differently_is_certain_soon(snapshot: SnapshotAssertion) -> None:
    calls = [called("all_reduce"), called("barrier", shapes="")]
    ranks = Ranks()
    at_s, told = only(
        ranks.live(
            8,
            lambda rank: {
                "doing": calls[rank].operation,
                "waiting": True,
                "waits": (calls[rank],),
                "place": f"train.py:{9 + rank} in main",
            },
        )
    )
    assert at_s <= 8
    assert told.name == "collectives-differ"
    assert told.as_json() == snapshot
    assert ranks.watch.hang is not None
    assert ranks.watch.hang.is_hopeless


def test_a_collective_that_all_are_in_has_a_minute_and_then_the_network_is_to_be_looked_at(
    snapshot: SnapshotAssertion,
) -> None:
    ranks = Ranks()
    assert ranks.live(58, lambda _: WAITING) == []
    _, told = only(ranks.live(6, lambda _: WAITING))
    assert told.name == "collective-does-not-end"
    assert "muster check --hosts" in told.fix
    assert told.as_json() == snapshot


def test_it_is_told_again_when_it_has_lasted_twice_as_long_and_when_it_is_over(
    snapshot: SnapshotAssertion,
) -> None:
    ranks = Ranks()
    told_s = [at_s for at_s, _ in ranks.live(100, one_against_all(1, ASLEEP))]
    assert told_s == [14, 32, 62]
    assert ranks.watch.hang is not None
    at_s, over = only(ranks.live(10, lambda _: {"moves": 41}))
    assert (over.name, over.status) == ("hang-over", Status.NOTE)
    assert over.what == snapshot
    assert at_s == 102
    assert ranks.watch.hang is None


def test_of_a_machine_that_is_not_heard_nothing_is_judged() -> None:
    ranks = Ranks(4)
    assert ranks.live(6, one_against_all(3, ASLEEP)) == []
    for _ in range(60):
        ranks.now_s += 2
        ranks.watch.hear("a", [heartbeat(rank, ranks.now_s, **WAITING) for rank in (0, 1)])
        assert ranks.watch.news() is None


def test_what_was_told_stays_as_it_was() -> None:
    ranks = Ranks()
    ranks.live(20, one_against_all(1, ASLEEP))
    told: Hang | None = ranks.watch.hang
    assert told is not None
    ranks.watch.hear("a", [heartbeat(1, ranks.now_s, doing="forward")])
    assert told.culprits[0].heartbeat.doing == "time.sleep"
