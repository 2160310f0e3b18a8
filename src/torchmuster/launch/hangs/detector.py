"""Decide from the observations of all ranks whether they hang, and which rank keeps the others waiting.

A hang needs evidence: some rank waits in a collective, and another one does not reach it. How long that must
last depends on what the other rank does: a stopped process does not resume by itself, a sleeping one seldom
does, and a busy one (compilation, evaluation) gets more time. So a slow first step is not a hang.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

from torchmuster.finding import Finding
from torchmuster.launch.hangs import messages
from torchmuster.launch.hangs.flight_recorder import DEFAULT_GROUP, can_be_same
from torchmuster.launch.hangs.observation import Hang, HangKind, Observation, progress_of
from torchmuster.launch.heartbeat import Heartbeat, PendingCollective

# A rank was stopped; ranks called different collectives; a rank has exited.
STOPPED_AFTER_S = 3.0
DIFFERENT_AFTER_S = 5.0
EXITED_AFTER_S = 5.0
# A rank does something else, without using its CPU.
IDLE_AFTER_S = 20.0
# A rank computes, or all ranks wait in the same collective.
BUSY_AFTER_S = 60.0
# The waiting ranks compute too, so they may have other work to do; or their collectives are not visible.
UNCERTAIN_AFTER_S = 300.0
_UNHEARD_S = 6.0  # without heartbeats nothing is known about a host's ranks
_NOT_AGAIN_BEFORE_S = 30.0


def find_hang(
    ranks: Sequence[Observation],
    now_s: float,
    *,
    are_all: bool,
    world_size_from_stacks: int | None = None,
) -> Hang | None:
    """Return the hang that these observations show, or None.

    ``are_all`` says that no rank of the job is missing among them. With ``world_size_from_stacks``, the number of ranks
    of the job, seen or not, the observations come from stacks taken from outside: they have no collective numbers, and
    ``moves`` counts every wake-up of a waiting rank.
    """
    if all(now_s - rank.same_since_s < STOPPED_AFTER_S for rank in ranks):
        return None
    different = _different_calls(ranks)
    if different:
        waited_s = _shortest_wait_s(different, now_s)
        if waited_s < DIFFERENT_AFTER_S:
            return None
        return _hang(HangKind.DIFFERENT, different, different, waited_s, now_s, is_hopeless=True)
    waiting = _waiting_ranks(ranks)
    stopped: list[Observation] = []
    absent: list[Observation] = []
    for rank in ranks:
        if rank.is_stopped:
            stopped.append(rank)
        elif rank not in waiting:
            absent.append(rank)
    if stopped:
        stopped_s = now_s - max(rank.state_since_s for rank in stopped)
        if stopped_s >= STOPPED_AFTER_S:
            return _hang(HangKind.STOPPED, stopped, waiting, stopped_s, now_s)
    if not waiting:
        return None
    if absent:
        return _missing_rank(absent, waiting, now_s)
    if stopped or not are_all:
        return None
    if world_size_from_stacks is not None:
        return _all_wait_by_stacks(ranks, now_s, world_size_from_stacks)
    return _all_wait(ranks, now_s)


def _hang(
    kind: HangKind,
    culprits: Iterable[Observation],
    waiting: Iterable[Observation],
    waited_s: float,
    now_s: float,
    *,
    is_hopeless: bool = False,
) -> Hang:
    # Copies: later heartbeats must not change what was reported.
    return Hang(
        kind=kind,
        culprits=tuple(dataclasses.replace(rank) for rank in culprits),
        waiting=tuple(dataclasses.replace(rank) for rank in waiting),
        waited_s=waited_s,
        now_s=now_s,
        is_hopeless=is_hopeless,
    )


def _shortest_wait_s(ranks: Iterable[Observation], now_s: float) -> float:
    return now_s - max(rank.same_since_s for rank in ranks)


def _waiting_ranks(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the ranks that wait for others.

    A rank that waits for GPU results keeps a CPU busy; so one that is stuck in a collective also counts if another rank is
    known not to have reached it.
    """
    least_begun: dict[str, int] = {}
    for rank in ranks:
        for group, number in rank.heartbeat.begun.items():
            least_begun[group] = min(number, least_begun.get(group, number))
    waiting = []
    for rank in ranks:
        is_ahead = False
        for call in rank.heartbeat.waits:
            if least_begun.get(call.group, call.number) < call.number:
                is_ahead = rank.may_wait
        if rank.waits or is_ahead:
            waiting.append(rank)
    return waiting


def _different_calls(ranks: Sequence[Observation]) -> list[Observation]:
    """Return ranks that wait in the same collective number of a group, but made different calls."""
    calls: dict[tuple[str, int], dict[int, PendingCollective]] = {}  # by rank
    for rank in ranks:
        if rank.may_wait:
            for call in rank.heartbeat.waits:
                calls.setdefault((call.group, call.number), {})[rank.rank] = call
    for by_rank in calls.values():
        if not can_be_same(by_rank.values()):
            return [rank for rank in ranks if rank.rank in by_rank]
    return []


def _missing_rank(
    absent: Sequence[Observation],
    waiting: Sequence[Observation],
    now_s: float,
) -> Hang | None:
    """Return the hang in which some of the absent ranks keep others waiting, the most certain ones first."""
    waited_s = now_s - min(rank.same_since_s for rank in waiting)
    members = _members(absent, waiting)
    # Ranks outside the group that is waited in are only blamed when all its members wait.
    at_least_s = 0.0 if members else BUSY_AFTER_S
    exited, idle, busy = [], [], []
    for rank in members or absent:
        if rank.has_exited:
            exited.append(rank)
        elif rank.is_at_work(now_s):
            busy.append(rank)
        else:
            idle.append(rank)
    if exited and waited_s >= max(at_least_s, EXITED_AFTER_S):
        return _hang(HangKind.EXITED, exited, waiting, waited_s, now_s)
    patience_s = max(at_least_s, IDLE_AFTER_S)
    if waited_s < BUSY_AFTER_S:
        # A rank that moved recently may still arrive; but this has a limit.
        idle = [rank for rank in idle if now_s - rank.still_since_s >= patience_s]
    if idle and waited_s >= patience_s:
        return _hang(HangKind.ELSEWHERE, idle, waiting, waited_s, now_s)
    busy_after_s = UNCERTAIN_AFTER_S
    if any(rank.waits for rank in waiting):  # they do not compute
        busy_after_s = BUSY_AFTER_S
    if busy and waited_s >= busy_after_s:
        return _hang(HangKind.ELSEWHERE, busy, waiting, waited_s, now_s)
    return None


def _members(absent: Sequence[Observation], waiting: Sequence[Observation]) -> list[Observation]:
    """Return the absent ranks that may be waited for: members of a waiting group, or with unknown groups."""
    groups: set[str] = set()
    for rank in waiting:
        if not rank.heartbeat.waits:
            return list(absent)
        groups.update(call.group for call in rank.heartbeat.waits)
    if DEFAULT_GROUP in groups:
        return list(absent)
    return [rank for rank in absent if not rank.groups or rank.groups & groups]


def _all_wait(ranks: Sequence[Observation], now_s: float) -> Hang | None:
    """Return the hang of ranks that all wait: in the same collective, or in different ones."""
    if len(ranks) == 1:
        return None
    pending = []
    for rank in ranks:
        pending.append({(call.group, call.number) for call in rank.heartbeat.waits})
    kind, patience_s = HangKind.DIFFERENT, IDLE_AFTER_S
    if not any(pending):
        # Not visible: healthy ranks may be seen in collectives each time, but hardly for minutes at the same line.
        kind, patience_s = HangKind.ALL_WAIT, UNCERTAIN_AFTER_S
    elif not all(pending):
        return None
    elif set.intersection(*pending):
        kind, patience_s = HangKind.ALL_WAIT, BUSY_AFTER_S
    waited_s = _shortest_wait_s(ranks, now_s)
    if waited_s < patience_s:
        return None
    return _hang(kind, ranks, ranks, waited_s, now_s)


def _all_wait_by_stacks(ranks: Sequence[Observation], now_s: float, world_size: int) -> Hang | None:
    """Return the hang of ranks that all wait, judged by what they called and where."""
    operations: set[str] = set()
    places: set[str] = set()
    for rank in ranks:
        if rank.is_busy:  # data that is being sent or received needs CPU time
            return None
        operations.add(rank.heartbeat.doing)
        places.add(rank.heartbeat.place)
    kind, patience_s = HangKind.ALL_WAIT, BUSY_AFTER_S
    if len(ranks) < world_size:  # they wait for the ranks that were not looked at
        patience_s = IDLE_AFTER_S
    elif len(operations) > 1 or len(places) > 1:
        kind, patience_s = HangKind.DIFFERENT, IDLE_AFTER_S
    waited_s = _shortest_wait_s(ranks, now_s)
    if waited_s < patience_s:
        return None
    is_hopeless = kind is HangKind.DIFFERENT and len(operations) > 1
    return _hang(kind, ranks, ranks, waited_s, now_s, is_hopeless=is_hopeless)


class HangWatch:
    """Receives the heartbeats of one attempt and tells what is new: a hang, that it continues, or that it is over."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        world_size_from_stacks: int | None = None,
    ) -> None:
        """``clock`` provides all times; ``world_size_from_stacks`` is as in :func:`find_hang`."""
        self._clock = clock
        self._world_size = world_size_from_stacks
        self._ranks: dict[int, Observation] = {}
        self._heard_s: dict[str, float] = {}
        self._report_again_after_s = 0.0
        self.hang: Hang | None = None  # the last reported one that is not over

    def hear(self, host: str, heartbeats: Iterable[Heartbeat]) -> None:
        """Process the heartbeats of a host's ranks; there may be none."""
        now_s = self._clock()
        self._heard_s[host] = now_s
        for heartbeat in heartbeats:
            known = self._ranks.get(heartbeat.rank)
            if known is None or known.heartbeat.pid != heartbeat.pid:
                known = Observation.first(host, heartbeat, now_s)
                self._ranks[heartbeat.rank] = known
            known.update(heartbeat, now_s)

    def news(self, devices: dict[int, str] | None = None) -> Finding | None:
        """Return a finding if there is news; call it about every second.

        ``devices`` are the device names of the ranks, for messages.
        """
        now_s = self._clock()
        before = self.hang
        hang = self._find(now_s)
        if hang is not None:
            self.hang = hang
            is_known = before is not None and before.key == hang.key
            if is_known and hang.waited_s < self._report_again_after_s:
                return None
            self._report_again_after_s = max(2 * hang.waited_s, _NOT_AGAIN_BEFORE_S)
            return messages.hang_finding(hang, devices or {})
        if before is None or not self._is_over(before):
            return None
        self.hang = None
        return messages.hang_over_finding(before, now_s)

    def _heard_lately(self, now_s: float) -> list[Observation]:
        heard = [
            rank for rank in self._ranks.values() if now_s - self._heard_s[rank.host] < _UNHEARD_S
        ]
        return sorted(heard, key=lambda rank: rank.rank)

    def _find(self, now_s: float) -> Hang | None:
        ranks = self._heard_lately(now_s)
        hang = find_hang(
            ranks,
            now_s,
            are_all=len(ranks) == len(self._ranks),
            world_size_from_stacks=self._world_size,
        )
        if hang is None or self._world_size is None:
            return hang
        unseen = tuple(rank for rank in range(self._world_size) if rank not in self._ranks)
        return dataclasses.replace(hang, from_stacks=True, unseen=unseen)

    def _is_over(self, hang: Hang) -> bool:
        """Return whether a reported hang is over; False while heartbeats are missing."""
        heard = {rank.rank: rank for rank in self._heard_lately(self._clock())}
        if hang.kind is HangKind.STOPPED and not any(rank.is_stopped for rank in heard.values()):
            return True
        for before in hang.waiting:
            rank = heard.get(before.rank)
            if rank is not None and (
                rank.same_since_s > before.same_since_s
                or progress_of(rank.heartbeat) != progress_of(before.heartbeat)
            ):
                return True
        return False
