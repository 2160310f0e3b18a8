"""Who keeps whom waiting: judged from made-up heartbeats, second by second; healthy runs raise no alarm."""

import re
from collections.abc import Callable, Iterable

import pytest

from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs import messages
from torchmuster.launch.hangs.detector import HangWatch
from torchmuster.launch.heartbeat import Heartbeat, PendingCollective

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


def test_a_rank_asleep_in_the_loader_is_named_with_host_device_place_step_and_who_waits() -> None:
    ranks = Ranks(4, devices={3: "GPU 1"})
    facts = {
        "doing": "DataLoader.__next__",
        "place": "train.py:88 in epoch",
        "phase": "loading data",
        "step": 120,
    }
    at_s, told = only(ranks.live(26, one_against_all(3, facts)))
    assert 20 <= at_s <= 24
    assert (told.name, told.status) == ("rank-elsewhere", Status.WARNING)
    assert re.fullmatch(
        r"rank 3 on b \(GPU 1\) keeps the others waiting: in DataLoader.__next__ for 2\d s at train.py:88 in epoch "
        r"\(loading data, step 120\); ranks 0-2 wait in all_reduce",
        told.what,
    )
    assert "what the loader reads on b" in told.fix


def in_a_pair(*others: dict[str, object]) -> Callable[[int], dict[str, object]]:
    """Let rank 0 wait in the group of ranks 0 and 1, and others do as they like."""
    waits = WAITING | {"waits": (called(group="pair", number=3),), "begun": {"0": 40, "pair": 3}}
    return lambda rank: others[rank - 1] if rank else waits


IN_THE_PAIR: dict[str, object] = {"groups": ("0", "pair"), "begun": {}}
NOT_IN_IT: dict[str, object] = {"groups": ("0",), "begun": {}}
AT_WORK: dict[str, object] = {"doing": "matmul", "busy": 1.0, "state": "R"}
SPINS: dict[str, object] = {"doing": "loss.item", "busy": 1.0, "state": "R"}
AHEAD: dict[str, object] = SPINS | {"waits": (called(),), "begun": {"0": 41}}
UNSEEN: dict[str, object] = {"doing": "all_reduce", "waiting": True, "moves": 1, "begun": {}}
DIFFERENT = [called("all_reduce"), called("barrier", shapes="")]


def different(rank: int) -> dict[str, object]:
    call = DIFFERENT[rank]
    return WAITING | {"doing": call.operation, "waits": (call,)}


# What the ranks do; who is named, why, and between which seconds; a word of the fix.
Judged = tuple[int, Callable[[int], dict[str, object]], str, str, tuple[int, int], str]
HANGS: dict[str, Judged] = {
    "asleep": (2, one_against_all(1, ASLEEP), "rank-elsewhere", "rank 1", (20, 24), "train.py:88"),
    "own code": (2, one_against_all(1, {"doing": ""}), "rank-elsewhere", "rank 1", (20, 24), ""),
    "stopped": (
        2,
        one_against_all(1, {"state": "T"}),
        "rank-stopped",
        "rank 1",
        (3, 8),
        "-CONT 101",
    ),
    "stopped before any waits": (
        *(2, lambda rank: {"state": "T"} if rank else {"moves": 3}),
        *("rank-stopped", "rank 1", (3, 6), "-CONT 101"),
    ),
    "exited": (2, one_against_all(1, {"state": "X"}), "rank-exited", "rank 1", (5, 10), "batches"),
    "in the kernel": (
        *(2, one_against_all(1, {"state": "D"}), "rank-elsewhere", "rank 1", (20, 24)),
        "cat /proc/101/stack",
    ),
    "in native code": (
        *(2, one_against_all(1, {"silent_s": 9.0, "doing": "tokenize"})),
        *("rank-elsewhere", "rank 1", (20, 24), "stacks"),
    ),
    "at work": (
        *(2, one_against_all(1, AT_WORK), "rank-elsewhere", "rank 1", (60, 66)),
        "rank_zero_first()",
    ),
    "saves for all": (
        *(2, one_against_all(1, {"phase": "saving"}), "rank-elsewhere", "rank 1", (60, 66), ""),
    ),
    "evaluates for all": (
        *(2, one_against_all(1, {"phase": "evaluating"}), "rank-elsewhere", "rank 1", (60, 66), ""),
    ),
    "waits on a GPU, which spins": (
        *(2, lambda rank: ASLEEP if rank else AHEAD, "rank-elsewhere", "rank 1", (20, 24), ""),
    ),
    "both spin, one has not come": (
        *(2, lambda rank: SPINS if rank else AHEAD, "rank-elsewhere", "rank 1", (300, 306), ""),
    ),
    "not in the group": (
        *(3, in_a_pair(AT_WORK | IN_THE_PAIR, ASLEEP | NOT_IN_IT)),
        *("rank-elsewhere", "rank 1", (60, 66), ""),
    ),
    "exited, not in the group": (
        *(3, in_a_pair(ASLEEP | IN_THE_PAIR, {"state": "X"} | NOT_IN_IT)),
        *("rank-elsewhere", "rank 1", (20, 24), ""),
    ),
    "all of the group wait": (
        *(3, in_a_pair(in_a_pair()(0), ASLEEP | NOT_IN_IT)),
        *("rank-elsewhere", "rank 2", (60, 66), ""),
    ),
    "called differently": (
        *(2, different, "collectives-differ", "the ranks called different", (5, 8), "same order"),
    ),
    "spin in different calls": (
        *(2, lambda rank: SPINS | {"waits": (DIFFERENT[rank],)}),
        *("collectives-differ", "the ranks called different", (5, 8), ""),
    ),
    "all called it": (
        *(2, lambda _: WAITING, "collective-does-not-end", "all ranks", (60, 66)),
        "muster check --hosts",
    ),
    "all wait, not visible": (
        *(2, lambda _: UNSEEN, "collective-does-not-end", "all ranks", (300, 306), ""),
    ),
}


@pytest.mark.parametrize("case", HANGS)
def test_a_hang_is_named_in_time(case: str) -> None:
    count, doing, name, who, (from_s, to_s), fix = HANGS[case]
    at_s, told = only(Ranks(count).live(to_s + 1, doing))
    assert (told.name, told.what.startswith(who)) == (name, True), told
    assert from_s <= at_s <= to_s
    assert fix in told.fix


HEALTHY: dict[str, tuple[int, Callable[[int], dict[str, object]]]] = {
    "all sleep": (200, lambda _: ASLEEP),
    "all compile": (200, lambda _: AT_WORK),
    "all load": (200, lambda _: {"doing": "DataLoader.__next__"}),
    "a collective under way while it computes": (
        *(200, lambda rank: {"busy": 0.9, "waits": (called(),)} if rank else {"busy": 0.9}),
    ),
    # What they said last, that one waits for the other, is no longer so.
    "take long to exit": (
        *(100, lambda rank: (ASLEEP if rank else WAITING) | {"silent_s": 9.0, "beat": 3}),
    ),
    "found in a collective each time": (200, lambda _: UNSEEN),
    "gets no processor": (
        *(50, one_against_all(1, {"busy": 0.02, "state": "R", "doing": "compile"})),
    ),
    "processes cannot be seen": (50, one_against_all(1, ASLEEP | {"state": "", "busy": None})),
    "spin, none has waits": (400, lambda rank: SPINS | {"begun": {"0": 41}} if rank else AHEAD),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_ranks_that_are_well_raise_no_alarm(case: str) -> None:
    seconds, doing = HEALTHY[case]
    assert Ranks().live(seconds, doing) == []


def test_a_rank_that_moves_but_hardly_computes_has_a_minute() -> None:
    ranks = Ranks()
    said = ranks.live(
        70, lambda rank: {"place": f"evaluate.py:{ranks.now_s:.0f}"} if rank else WAITING
    )
    at_s, told = only(said)
    assert 60 <= at_s <= 64
    assert told.what.startswith("rank 1 on a ")


def test_a_rank_that_looks_again_and_again_whether_something_has_come_is_asleep() -> None:
    ranks = Ranks()
    lines = ["wait.py:3", "wait.py:4", "wait.py:3", "wait.py:5"]
    said = ranks.live(
        30, lambda rank: {"place": lines[int(ranks.now_s) // 2 % 4]} if rank else WAITING
    )
    at_s, _ = only(said)
    assert at_s <= 30


def test_a_waiting_rank_that_moves_hides_no_hang() -> None:
    ranks = Ranks(3)

    def doing(rank: int) -> dict[str, object]:
        polls = WAITING | {"place": f"wait.py:{ranks.now_s:.0f}"}
        return (WAITING, polls, ASLEEP)[rank]

    _, told = only(ranks.live(24, doing))
    assert told.what.startswith("rank 2 on b ")


def test_where_nothing_is_known_of_moves_every_other_place_is_a_move() -> None:
    ranks = Ranks()
    lines = ["train.py:3", "train.py:4", "train.py:5"]

    def doing(rank: int) -> dict[str, object]:
        line = {"moves": 1, "place": lines[int(ranks.now_s) // 2 % 3]}
        return line if rank else line | {"doing": "all_reduce", "waiting": True}

    assert ranks.live(200, doing) == []


def test_waits_that_end_are_no_hang() -> None:
    ranks = Ranks()
    for step in range(20):
        moves: dict[str, object] = {"moves": step}
        slow = WAITING | moves
        assert ranks.live(16, lambda rank: ASLEEP | moves if rank else slow) == []  # noqa: B023
        assert ranks.live(2, lambda _: slow) == []  # noqa: B023


def test_ranks_that_can_never_meet_are_hopeless() -> None:
    ranks = Ranks()
    ranks.live(8, different)
    assert ranks.watch.hang is not None
    assert ranks.watch.hang.is_hopeless


def test_it_is_told_again_when_it_has_lasted_twice_as_long_and_when_it_is_over() -> None:
    ranks = Ranks()
    told_s = [at_s for at_s, _ in ranks.live(100, one_against_all(1, ASLEEP))]
    assert told_s == [22, 42, 82]
    at_s, over = only(ranks.live(10, lambda _: {"moves": 41}))
    assert (over.name, over.status) == ("hang-over", Status.NOTE)
    assert at_s == 102
    assert ranks.watch.hang is None


def test_of_a_machine_that_is_not_heard_nothing_is_judged() -> None:
    ranks = Ranks(4)
    assert ranks.live(6, one_against_all(3, ASLEEP)) == []
    for _ in range(60):
        ranks.now_s += 2
        ranks.watch.hear("a", [heartbeat(rank, ranks.now_s, **WAITING) for rank in (0, 1)])
        assert ranks.watch.news() is None
