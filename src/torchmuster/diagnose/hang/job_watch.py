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
    def is_read(self) -> bool:
        """Whether its stack could be taken."""
        return self.look is not None and not self.look.problem

    @property
    def computes(self) -> bool:
        """Whether it uses its CPU for anything other than waiting."""
        look = self.look
        return look is not None and not look.waiting and look.busy >= BUSY_PROCESSORS

    @property
    def stands_still(self) -> bool:
        """Whether it has moved or run at most once."""
        return not self.computes and max(self.moved, self.woke) < _LEAST_MOVES

    def update(self, look: RankLook) -> None:
        """Record another observation of the rank."""
        before = self.look
        if look.problem and before is not None and look.state == before.state:
            return
        is_idle = look.busy < BUSY_PROCESSORS
        is_first = before is None
        same_thread = before is not None and before.thread == look.thread
        same_call = before is not None and same_thread and before.stack == look.stack
        start, end, _ = look.wakeups
        has_run = end != start or (
            before is not None and same_thread and start != before.wakeups[2]
        )
        keeps_reading = same_call and is_idle and self.native
        if before is not None and keeps_reading:
            reading = {name: getattr(before, name) for name in _READ}
            look = msgspec.structs.replace(look, **reading)
        woke_in_collective = look.waiting and has_run
        self.moves += woke_in_collective
        self.moved += not is_first and (not same_call or woke_in_collective)
        self.woke += has_run
        self.native = keeps_reading or (not self.native and (is_idle or self.process.uses_gpu))
        self.look = look

    def heartbeat(self, beat: int) -> Heartbeat:
        """Return the last look as a heartbeat for the hang detector."""
        look = self.look
        assert look is not None
        return Heartbeat(
            rank=self.rank,
            pid=look.pid,
            beat=beat,
            moves=self.moves,
            phase=look.phase,
            place=look.place,
            doing=look.doing,
            waiting=look.waiting,
            state=look.state,
            busy=look.busy,
        )


class JobWatch:
    """Watches the ranks of one job; ``clock`` provides all times."""

    def __init__(
        self, ranks: Sequence[SeenRank], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ranks = sorted(ranks, key=lambda rank: rank.rank)
        self.world_size = max(rank.process.world_size for rank in ranks)
        self._watch = HangWatch(clock, stacks_of=self.world_size)
        self._looks = 0

    @property
    def hosts(self) -> list[str]:
        """The hosts with ranks of the job; the host of the lowest rank comes first."""
        return list(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def hang(self) -> Hang | None:
        """The hang, once there is one."""
        return self._watch.hang

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
        return all(rank.look is not None and rank.look.state == GONE for rank in self.ranks)

    @property
    def moving(self) -> bool:
        """Whether no rank stands still."""
        if self.still:
            return False
        return any(rank.moved >= _LEAST_MOVES or rank.computes for rank in self.ranks)

    def request_for(self, host: str, *, nonblocking: bool) -> LookRequest:
        """Return what to ask a host: native frames only if they are not known yet."""
        processes = [rank.process for rank in self._of(host)]
        unknown = [rank.process for rank in self._of(host) if not rank.native]
        return LookRequest(
            pids=tuple(process.pid for process in processes),
            native_if_idle=tuple(process.pid for process in unknown),
            native=tuple(process.pid for process in unknown if process.uses_gpu),
            nonblocking=nonblocking,
        )

    def heard(self, host: str, looks: Sequence[RankLook]) -> None:
        """Record observations of the ranks of a host."""
        by_pid = {rank.process.pid: rank for rank in self._of(host)}
        for look in looks:
            by_pid[look.pid].update(look)

    def judge(self) -> Finding | None:
        """Return the hang if there is one; call it after each host has answered."""
        self._looks += 1
        if self.unread:
            return None
        for host in self.hosts:
            seen = [rank.heartbeat(self._looks) for rank in self._of(host)]
            self._watch.hear(host, [*seen, *self._exited_before(host)])
        return self._watch.news()

    def _of(self, host: str) -> list[SeenRank]:
        return [rank for rank in self.ranks if rank.host == host]

    def _exited_before(self, host: str) -> list[Heartbeat]:
        """Return heartbeats for ranks of a host that exited before the first look; its ranks are consecutive."""
        seen: set[int] = set()
        expected: set[int] = set()
        for rank in self._of(host):
            process = rank.process
            first = process.rank - process.local_rank
            seen.add(process.rank)
            expected.update(range(first, first + process.local_world_size))
        missing = sorted(expected - seen)
        return [
            Heartbeat(rank=rank, pid=0, beat=0, moves=_MOVES_BEFORE, state=GONE) for rank in missing
        ]
