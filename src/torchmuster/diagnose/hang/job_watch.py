"""Decide whether the ranks of a job hang: turn snapshots of them into heartbeats for the hang detector."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from torchmuster.diagnose.hang.rank_processes import RankProcess
from torchmuster.diagnose.hang.rank_stacks import RankSnapshot, SnapshotRequest
from torchmuster.launch.hangs.detector import HangWatch
from torchmuster.launch.hangs.observation import BUSY_PROCESSORS, Hang
from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.node.heartbeats import GONE

# The job has been running for a while: the patience for its first collectives does not apply.
_MOVES_BEFORE = 1000
# A single move may be the last one before the hang.
_LEAST_MOVES = 2


@dataclass(kw_only=True)
class SeenRank:
    """A rank of the job, and what the snapshots so far show about it.

    ``moved`` counts the snapshots in which it was in another call than before, or woke up in a collective; ``woke``
    those in which it ran at all: it may only poll for the same thing.
    """

    host: str
    process: RankProcess
    snapshot: RankSnapshot | None = None
    moves: int = _MOVES_BEFORE
    moved: int = 0
    woke: int = 0
    native_known: bool = False  # its native frames were read in this call

    @property
    def rank(self) -> int:
        """The rank number."""
        return self.process.rank

    @property
    def is_read(self) -> bool:
        """Whether its stack could be taken."""
        return self.snapshot is not None and not self.snapshot.problem

    @property
    def computes(self) -> bool:
        """Whether it uses its CPU for anything other than waiting."""
        snapshot = self.snapshot
        return snapshot is not None and not snapshot.waiting and snapshot.busy >= BUSY_PROCESSORS

    @property
    def stands_still(self) -> bool:
        """Whether it has moved or run at most once."""
        return not self.computes and max(self.moved, self.woke) < _LEAST_MOVES

    def update(self, snapshot: RankSnapshot) -> None:
        """Take in another snapshot of the rank."""
        before = self.snapshot
        is_idle = snapshot.busy < BUSY_PROCESSORS
        started, ended, _ = snapshot.wakeups
        has_run = started != ended
        has_moved = keeps_reading = False
        if before is not None:
            if snapshot.problem and snapshot.state == before.state:
                return
            same_thread = before.thread == snapshot.thread
            same_call = same_thread and before.stack == snapshot.stack
            has_run = has_run or (same_thread and started != before.wakeups[2])
            has_moved = not same_call
            keeps_reading = self.native_known and same_call and is_idle
            if keeps_reading:  # this snapshot is without native frames
                snapshot = msgspec.structs.replace(
                    before, state=snapshot.state, busy=snapshot.busy, wakeups=snapshot.wakeups
                )
        if snapshot.waiting and has_run:  # it woke up in a collective
            self.moves += 1
            has_moved = before is not None
        self.moved += has_moved
        self.woke += has_run
        if self.native_known:
            self.native_known = keeps_reading
        else:
            self.native_known = is_idle or self.process.uses_gpu
        self.snapshot = snapshot

    def heartbeat(self, beat: int) -> Heartbeat:
        """Return the last snapshot as a heartbeat for the hang detector."""
        snapshot = self.snapshot
        assert snapshot is not None
        return Heartbeat(
            rank=self.rank,
            pid=snapshot.pid,
            beat=beat,
            moves=self.moves,
            phase=snapshot.phase,
            place=snapshot.place,
            doing=snapshot.doing,
            waiting=snapshot.waiting,
            state=snapshot.state,
            busy=snapshot.busy,
        )


class JobWatch:
    """Watches the ranks of one job; ``clock`` provides all times."""

    def __init__(
        self, ranks: Sequence[SeenRank], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ranks = sorted(ranks, key=lambda rank: rank.rank)
        self.world_size = max(rank.process.world_size for rank in ranks)
        self._detector = HangWatch(clock, world_size_from_stacks=self.world_size)
        self._beats = 0

    @property
    def hosts(self) -> list[str]:
        """The hosts with ranks of the job; the host of the lowest rank comes first."""
        return list(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def hang(self) -> Hang | None:
        """The hang, once there is one."""
        return self._detector.hang

    @property
    def unread(self) -> list[SeenRank]:
        """The ranks whose stack could not be taken."""
        return [rank for rank in self.ranks if not rank.is_read]

    @property
    def still(self) -> list[int]:
        """The ranks that stand still."""
        return [rank.rank for rank in self.ranks if rank.stands_still]

    @property
    def exited(self) -> bool:
        """Whether all ranks have exited."""
        for rank in self.ranks:
            if rank.snapshot is None or rank.snapshot.state != GONE:
                return False
        return True

    @property
    def moving(self) -> bool:
        """Whether no rank stands still."""
        if self.still:
            return False
        return any(rank.moved >= _LEAST_MOVES or rank.computes for rank in self.ranks)

    def request_for(self, host: str) -> SnapshotRequest:
        """Return what to ask a host: native frames only of ranks where they are not known yet."""
        pids, native = [], []
        for rank in self._on(host):
            pids.append(rank.process.pid)
            if not rank.native_known:
                native.append(rank.process.pid)
        return SnapshotRequest(pids=tuple(pids), native=tuple(native))

    def add(self, host: str, snapshots: Sequence[RankSnapshot]) -> None:
        """Take in snapshots of the ranks of a host."""
        by_pid = {rank.process.pid: rank for rank in self._on(host)}
        for snapshot in snapshots:
            by_pid[snapshot.pid].update(snapshot)

    def judge(self) -> Hang | None:
        """Return the hang if there is one; call it after each host has answered."""
        self._beats += 1
        if self.unread:
            return None
        for host in self.hosts:
            heartbeats = [rank.heartbeat(self._beats) for rank in self._on(host)]
            self._detector.hear(host, heartbeats + self._exited_before(host))
        self._detector.news()
        return self.hang

    def _on(self, host: str) -> list[SeenRank]:
        return [rank for rank in self.ranks if rank.host == host]

    def _exited_before(self, host: str) -> list[Heartbeat]:
        """Return heartbeats for ranks of a host that exited before the first snapshot; its ranks are consecutive."""
        missing: set[int] = set()
        for rank in self._on(host):
            first = rank.process.rank - rank.process.local_rank
            missing.update(range(first, first + rank.process.local_world_size))
        missing.difference_update(rank.rank for rank in self._on(host))
        heartbeats = []
        for number in sorted(missing):
            heartbeats.append(
                Heartbeat(rank=number, pid=0, beat=0, moves=_MOVES_BEFORE, state=GONE)
            )
        return heartbeats
