"""Decide whether the ranks of a job hang: turn observations of them into heartbeats for the hang detector."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from torchmuster.diagnose.hang.rank_processes import RankProcess
from torchmuster.diagnose.hang.rank_stacks import LookRequest, RankLook
from torchmuster.finding import Finding
from torchmuster.launch.hangs.detector import HangWatch
from torchmuster.launch.hangs.hang import Hang
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.hangs.observation import BUSY_PROCESSORS
from torchmuster.launch.node.heartbeats import GONE

# The job has been running for a while: the patience for its first collectives does not apply.
_MOVES_BEFORE = 1000
# A single move may be the last one before the hang.
_LEAST_MOVES = 2
# What a look says about the stack; kept while the rank is idle in the same call.
_READ = ("place", "doing", "phase", "waiting", "source", "workers")


@dataclass(kw_only=True)
class SeenRank:
    """A rank of the job, and what the observations so far show about it."""

    host: str
    process: RankProcess
    look: RankLook | None = None
    moves: int = _MOVES_BEFORE
    moved: int = (
        0  # in how many looks it was in another call than before, or woke up in a collective
    )
    woke: int = 0  # in how many it ran; it may only look again and again for the same thing
    native: bool = False  # its native frames were read in this call

    @property
    def rank(self) -> int:
        """The rank number."""
        return self.process.rank

    @property
    def computes(self) -> bool:
        """Whether it uses its CPU for anything other than waiting."""
        look = self.look
        return look is not None and not look.waiting and look.busy >= BUSY_PROCESSORS

    def update(self, look: RankLook) -> None:
        """Record another observation of the rank."""
        before = self.look
        if look.problem and before is not None and look.state == before.state:
            return
        again = before is not None and before.thread == look.thread
        start, end, _ = look.wakeups
        woke = end != start or (before is not None and again and start != before.wakeups[2])
        same = before is not None and again and before.stack == look.stack
        idle = look.busy < BUSY_PROCESSORS
        keeps = same and idle and self.native
        if before is not None and keeps:
            kept = {name: getattr(before, name) for name in _READ}
            look = msgspec.structs.replace(look, **kept)
        if look.waiting and woke:
            self.moves += 1
        if before is not None and (not same or (look.waiting and woke)):
            self.moved += 1
        self.woke += woke
        self.native = keeps or (not self.native and (idle or self.process.uses_gpu))
        self.look = look


class JobWatch:
    """Watches the ranks of one job; ``clock`` provides all times."""

    def __init__(
        self, ranks: Sequence[SeenRank], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ranks = sorted(ranks, key=lambda one: one.rank)
        self.world_size = max(one.process.world_size for one in ranks)
        self._watch = HangWatch(clock, stacks_of=self.world_size)
        self._looks = 0

    @property
    def hosts(self) -> list[str]:
        """The hosts with ranks of the job; the host of the lowest rank comes first."""
        return list(dict.fromkeys(one.host for one in self.ranks))

    @property
    def hang(self) -> Hang | None:
        """The hang, once there is one."""
        return self._watch.hang

    @property
    def unread(self) -> list[SeenRank]:
        """The ranks whose stack could not be taken."""
        return [one for one in self.ranks if one.look is None or one.look.problem]

    @property
    def still(self) -> list[int]:
        """The ranks that have moved or run at most once."""
        return [
            one.rank
            for one in self.ranks
            if not one.computes and max(one.moved, one.woke) < _LEAST_MOVES
        ]

    @property
    def exited(self) -> bool:
        """Whether all ranks have exited."""
        return all(one.look is not None and one.look.state == GONE for one in self.ranks)

    @property
    def moving(self) -> bool:
        """Whether no rank stands still."""
        return not self.still and any(
            one.moved >= _LEAST_MOVES or one.computes for one in self.ranks
        )

    def request_for(self, host: str, *, nonblocking: bool) -> LookRequest:
        """Return what to ask a host: native frames only if they are not known yet."""
        own = [one for one in self.ranks if one.host == host]
        wanted = [one for one in own if not one.native]
        return LookRequest(
            pids=tuple(one.process.pid for one in own),
            native_if_idle=tuple(one.process.pid for one in wanted),
            native=tuple(one.process.pid for one in wanted if one.process.uses_gpu),
            nonblocking=nonblocking,
        )

    def heard(self, host: str, looks: Sequence[RankLook]) -> None:
        """Record observations of the ranks of a host."""
        by_pid = {one.process.pid: one for one in self.ranks if one.host == host}
        for look in looks:
            by_pid[look.pid].update(look)

    def judge(self) -> Finding | None:
        """Return the hang if there is one; call it after each host has answered."""
        self._looks += 1
        if self.unread:
            return None
        for host in self.hosts:
            seen = [_heartbeat(one, self._looks) for one in self.ranks if one.host == host]
            self._watch.hear(host, [*seen, *self._exited(host)])
        return self._watch.news()

    def _exited(self, host: str) -> list[Heartbeat]:
        """Return heartbeats for exited ranks of a host, whose ranks have consecutive numbers."""
        own = [one.process for one in self.ranks if one.host == host]
        expected = {
            one.rank - one.local_rank + place
            for one in own
            for place in range(one.local_world_size)
        }
        missing = expected - {one.rank for one in own}
        return [
            Heartbeat(rank=rank, pid=0, beat=0, moves=_MOVES_BEFORE, state=GONE)
            for rank in sorted(missing)
        ]


def _heartbeat(seen: SeenRank, beat: int) -> Heartbeat:
    look = seen.look
    assert look is not None
    return Heartbeat(
        rank=seen.rank,
        pid=look.pid,
        beat=beat,
        moves=seen.moves,
        phase=look.phase,
        place=look.place,
        doing=look.doing,
        waiting=look.waiting,
        state=look.state,
        busy=look.busy,
    )
