"""Detect hangs from the ranks' heartbeats over time.

A hang needs evidence: some rank waits in a collective, and another one does not reach it. How long that must
last depends on what the other rank does: a stopped process does not resume by itself, a sleeping one seldom
does, and a busy one (compilation, evaluation) gets more time. So a slow first step is not a hang.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchmuster.finding import Finding
from torchmuster.launch.hangs import messages
from torchmuster.launch.hangs.flight_recorder import EVERYBODY, SAME_SHAPES
from torchmuster.launch.hangs.hang_types import (
    ALL_WAIT,
    SILENT_S,
    Hang,
    HangKind,
    ObservedRank,
    RankSample,
)
from torchmuster.launch.hangs.heartbeat import Heartbeat, PendingCollective

_STOPPED_AFTER_S = 3.0
_DIFFERENT_AFTER_S = 5.0
_ENDED_AFTER_S = 5.0
_ASLEEP_AFTER_S = 12.0
# Longer if the ranks have run only a few collectives: connections and caches are new.
_ASLEEP_AT_FIRST_AFTER_S = 20.0
_AT_FIRST = 8  # collectives
_AT_WORK_AFTER_S = 60.0
# If the waiting ranks compute too, they may have other work to do.
_AT_WORK_BOTH_AFTER_S = 300.0
_UNHEARD_S = 6.0  # without heartbeats nothing is known about a host's ranks
_SAMPLES_FOR_S = 10.0
_NOT_AGAIN_BEFORE_S = 30.0
_MOVES_SEEN = 3
# Phases that one rank may spend alone for a while, using little CPU.
_LONG_PHASES = ("saving", "evaluating", "compiling")


_PATIENCE_S: Mapping[HangKind, float] = {
    HangKind.DIFFERENT: _DIFFERENT_AFTER_S,
    HangKind.STOPPED: _STOPPED_AFTER_S,
    HangKind.ENDED: _ENDED_AFTER_S,
    HangKind.NATIVE: _ASLEEP_AFTER_S,
    HangKind.DISK: _ASLEEP_AFTER_S,
    HangKind.ASLEEP: _ASLEEP_AFTER_S,
    HangKind.UNEQUAL: _ASLEEP_AFTER_S,
    HangKind.UNSEEN: _ASLEEP_AFTER_S,
    HangKind.AT_WORK: _AT_WORK_AFTER_S,
    HangKind.TOGETHER: _AT_WORK_AFTER_S,
}


class HangWatch:
    """Receives the heartbeats of one attempt; ``look`` is called about every second."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        devices: Mapping[int, str] | None = None,
        stacks_of: int | None = None,
    ) -> None:
        """Use ``clock`` for all times; ``devices`` are the device names of the ranks, for messages.

        With ``stacks_of``, the heartbeats come from stacks that were taken from outside: they have no collective
        numbers, ``moves`` counts every wake-up of a waiting rank, and the job has this many ranks, seen or not.
        """
        self._clock = clock
        self._stacks_of = stacks_of
        self._devices = devices or {}
        self._ranks: dict[int, ObservedRank] = {}
        self._of_host: dict[str, list[ObservedRank]] = {}
        self._hosts: dict[str, float] = {}
        self._slow: set[str] = set()  # hosts with a rank that has made no progress lately
        self._told: Hang | None = None
        self._tell_after_s = 0.0

    @property
    def told(self) -> Hang | None:
        """The last reported hang that is not over."""
        return self._told

    def heard(self, host: str, heartbeats: Iterable[Heartbeat], *, moving: bool = False) -> None:
        """Process the heartbeats of a host's ranks; there may be none.

        ``moving``: its other ranks have made progress too.
        """
        now = self._clock()
        self._hosts[host] = now
        if moving and host in self._slow:
            self._slow.discard(host)
            for one in self._of_host.get(host, ()):
                one.forget_wait(now)
        elif not moving:
            self._slow.add(host)
        for one in self._of_host.get(host, ()) if moving else ():
            one.since_s = one.still_s = now
        for heartbeat in heartbeats:
            known = self._ranks.get(heartbeat.rank)
            if known is None or known.heartbeat.pid != heartbeat.pid:
                known = ObservedRank(
                    host=host, heartbeat=heartbeat, since_s=now, still_s=now, state_since_s=now
                )
                self._forget(heartbeat.rank)
                self._ranks[heartbeat.rank] = known
                self._of_host.setdefault(host, []).append(known)
            _go_on(known, heartbeat, now)

    def _forget(self, rank: int) -> None:
        """Remove an earlier process of a rank."""
        if (old := self._ranks.pop(rank, None)) is not None:
            self._of_host[old.host].remove(old)

    def look(self) -> Finding | None:
        """Return a finding if there is news: a hang, that it continues, or that it is over."""
        now = self._clock()
        hang = self._judge(now)
        before = self._told
        if hang is not None:
            again = before is not None and before.key == hang.key
            if again and hang.waited_s < self._tell_after_s:
                self._told = hang
                return None
            self._told = hang
            self._tell_after_s = max(2 * hang.waited_s, _NOT_AGAIN_BEFORE_S)
            return messages.hang_finding(hang, self._devices)
        if before is None or not self._is_over(before):
            return None
        self._told = None
        ended = [one.rank for one in self._ranks.values() if one.ended]
        return messages.hang_over_finding(before, now, ended=ended)

    def _is_over(self, hang: Hang) -> bool:
        """Return whether a reported hang is over; False while heartbeats are missing."""
        heard = {one.rank: one for one in self._heard_of(self._clock())}
        return any(
            one.rank in heard
            and (
                heard[one.rank].since_s > one.since_s
                or _progress(heard[one.rank].heartbeat) != _progress(one.heartbeat)
            )
            for one in hang.waiting
        ) or (hang.kind is HangKind.STOPPED and not any(one.stopped for one in heard.values()))

    # ---- judging

    def _heard_of(self, now: float) -> list[ObservedRank]:
        return [one for one in self._ranks.values() if now - self._hosts[one.host] < _UNHEARD_S]

    def _judge(self, now: float) -> Hang | None:
        if not self._slow:
            return None
        heard = self._heard_of(now)
        if all(now - one.since_s < _STOPPED_AFTER_S for one in heard):
            return None  # nobody waits for long enough
        ranks = sorted(heard, key=lambda one: one.rank)
        # A rank that waits for GPU results keeps a CPU busy; so it also counts as waiting if another rank is
        # known to be missing in its collective.
        least_begun = _least_begun(ranks)
        waiting = [one for one in ranks if one.waits or one.is_ahead(least_begun)]
        if different := _different([one for one in ranks if one.may_wait]):
            return self._hang(HangKind.DIFFERENT, different, different, now)
        if stopped := [one for one in ranks if one.stopped]:
            stopped_s = min(now - one.state_since_s for one in stopped)
            if stopped_s >= _STOPPED_AFTER_S:
                return self._hang(HangKind.STOPPED, stopped, waiting, now, waited_s=stopped_s)
        here = {one.rank for one in waiting}
        absent = [one for one in ranks if one.rank not in here and not one.stopped]
        if not waiting:
            return None
        if not absent:
            everybody = len(ranks) == len(self._ranks) and not stopped
            return self._all_wait(ranks, now) if everybody else None
        members = _members(absent, waiting)
        at_least_s = 0.0 if members else _AT_WORK_AFTER_S
        by_kind: dict[HangKind, list[ObservedRank]] = {}
        for one in members or absent:
            by_kind.setdefault(_what_keeps(one, now), []).append(one)
        for kind in HangKind:  # most certain first: the other ranks may only be slow
            some = by_kind.get(kind)
            if some and (hang := self._hang(kind, some, waiting, now, at_least_s=at_least_s)):
                return hang
        return None

    def _all_wait(self, ranks: Sequence[ObservedRank], now: float) -> Hang | None:
        if self._stacks_of is not None:
            # Data that is being sent or received needs CPU time.
            if any(one.busy for one in ranks):
                return None
            kind = _by_stacks(ranks, self._stacks_of)
            return self._hang(kind, ranks, ranks, now, at_least_s=_ASLEEP_AFTER_S)
        if len(ranks) == 1:
            return None
        numbers = [{(one.group, one.number) for one in rank.heartbeat.waits} for rank in ranks]
        if not all(numbers):  # sampling may find healthy ranks in collectives each time
            return None
        together = bool(set.intersection(*numbers))
        return self._hang(HangKind.TOGETHER if together else HangKind.UNEQUAL, ranks, ranks, now)

    def _hang(
        self,
        kind: HangKind,
        culprits: Sequence[ObservedRank],
        waiting: Sequence[ObservedRank],
        now: float,
        *,
        waited_s: float | None = None,
        at_least_s: float = 0.0,
    ) -> Hang | None:
        """Return the hang if it has lasted long enough."""
        if waited_s is None:
            # The longest wait counts; if all of them must be stuck, the shortest.
            waits = [now - one.since_s for one in waiting]
            everybody = kind in ALL_WAIT
            waited_s = min(waits) if everybody else max(waits)
        patience_s = max(at_least_s, _PATIENCE_S[kind])
        if kind is HangKind.AT_WORK and not any(one.waits for one in waiting):
            patience_s = _AT_WORK_BOTH_AFTER_S
        if kind in (HangKind.ASLEEP, HangKind.DISK, HangKind.NATIVE):
            if self._at_first():
                patience_s = max(patience_s, _ASLEEP_AT_FIRST_AFTER_S)
            # A rank that moved recently may still arrive; but this has a limit.
            long = [one for one in culprits if now - one.still_s >= patience_s]
            culprits = long or (culprits if waited_s >= _AT_WORK_AFTER_S else [])
        if waited_s < patience_s or not culprits:
            return None
        # Copies: later heartbeats must not change what was reported.
        return Hang(
            kind=kind,
            culprits=tuple(dataclasses.replace(one) for one in culprits),
            waiting=tuple(dataclasses.replace(one) for one in waiting),
            waited_s=waited_s,
            now_s=now,
            at_least=self._stacks_of is not None,
            unseen=tuple(rank for rank in range(self._stacks_of or 0) if rank not in self._ranks),
        )

    def _at_first(self) -> bool:
        """Return whether the ranks have run only a few collectives."""
        heartbeats = [one.heartbeat for one in self._ranks.values()]
        numbers = [number for heartbeat in heartbeats for number in heartbeat.begun.values()]
        return max(numbers or [heartbeat.moves for heartbeat in heartbeats]) <= _AT_FIRST


def _go_on(known: ObservedRank, heartbeat: Heartbeat, now: float) -> None:
    """Process a heartbeat of the same process."""
    before = known.heartbeat
    known.heartbeat = heartbeat
    known.groups.update(heartbeat.groups, heartbeat.begun)
    if heartbeat.state != before.state:
        known.state_since_s = now
    if _progress(heartbeat) != _progress(before):
        known.since_s = now
    place = (heartbeat.place, heartbeat.doing)
    # A polling rank alternates between the same few lines. If progress cannot be seen, every change
    # counts.
    if heartbeat.moves != before.moves or heartbeat.moves < _MOVES_SEEN:
        known.places.clear()
    if place not in known.places and place != (before.place, before.doing):
        known.still_s = now
    if heartbeat.moves != before.moves:
        known.still_s = now
    known.places.add(place)
    if heartbeat.busy is not None:
        known.samples.append(
            RankSample(at_s=now, load=heartbeat.busy, ready=heartbeat.state == "R")
        )
        while known.samples[0].at_s < now - _SAMPLES_FOR_S:
            known.samples.popleft()


def _progress(heartbeat: Heartbeat) -> tuple[object, ...]:
    """Return the values that change when a rank makes progress."""
    return (
        heartbeat.pid,
        heartbeat.moves,
        heartbeat.step,
        heartbeat.phase,
        heartbeat.place,
        heartbeat.doing,
    )


def _least_begun(ranks: Sequence[ObservedRank]) -> dict[str, int]:
    """Return the lowest collective number of each group, among the ranks that are stuck."""
    least: dict[str, int] = {}
    for one in ranks:
        for group, number in one.heartbeat.begun.items():
            least[group] = min(number, least.get(group, number))
    return least


def _members(absent: Sequence[ObservedRank], waiting: Sequence[ObservedRank]) -> list[ObservedRank]:
    """Return the absent ranks that may be waited for: members of a waiting group, or with unknown groups."""
    groups = {called.group for one in waiting for called in one.heartbeat.waits}
    if EVERYBODY in groups or not all(one.heartbeat.waits for one in waiting):
        return list(absent)
    return [one for one in absent if not one.groups or one.groups & groups]


def _different(waiting: Sequence[ObservedRank]) -> list[ObservedRank]:
    """Return ranks that wait in the same collective number of a group, but made different calls."""
    by_number: dict[tuple[str, int], list[tuple[ObservedRank, PendingCollective]]] = {}
    for one in waiting:
        for called in one.heartbeat.waits:
            by_number.setdefault((called.group, called.number), []).append((one, called))
    for ranks in by_number.values():
        if len({called.operation for _, called in ranks}) > 1:
            return [one for one, _ in ranks]
        brought = {(called.shapes, called.dtype) for _, called in ranks if called.shapes}
        if ranks[0][1].operation in SAME_SHAPES and len(brought) > 1:
            return [one for one, _ in ranks]
    return []


def _by_stacks(ranks: Sequence[ObservedRank], world_size: int) -> HangKind:
    """Return what keeps ranks waiting that all wait, from what they called and where."""
    if len(ranks) < world_size:
        return HangKind.UNSEEN
    if len({one.heartbeat.doing for one in ranks}) > 1:
        return HangKind.DIFFERENT
    return (
        HangKind.UNEQUAL if len({one.heartbeat.place for one in ranks}) > 1 else HangKind.TOGETHER
    )


def _what_keeps(one: ObservedRank, now: float) -> HangKind:
    """Return what keeps a rank from reaching the collective."""
    if one.ended:
        return HangKind.ENDED
    if one.heartbeat.state == "D" and now - one.state_since_s >= SILENT_S:
        return HangKind.DISK
    if one.busy or one.heartbeat.phase in _LONG_PHASES:
        return HangKind.AT_WORK
    return HangKind.NATIVE if one.silent else HangKind.ASLEEP
