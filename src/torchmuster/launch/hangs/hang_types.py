"""What the hang detector knows of ranks, and the hang it found."""

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchmuster.launch.hangs.heartbeat import Heartbeat

# Less than this is what a process uses that waits.
BUSY_PROCESSORS = 0.1


READY_MOSTLY = 0.8


SILENT_S = 6.0


class HangKind(enum.Enum):
    """What keeps a rank from coming, the most certain first."""

    DIFFERENT = "different"  # the ranks called different things: they can never meet
    STOPPED = "stopped"  # by a signal or a debugger
    ENDED = "ended"
    NATIVE = "native"  # in native code, with Python's lock held
    DISK = "disk"  # in the kernel: a disk, a network file system, a driver
    ASLEEP = "asleep"
    AT_WORK = "at work"
    UNEQUAL = "unequal"  # all wait, but not in the same collective
    TOGETHER = "together"  # all wait in the same one


@dataclass(frozen=True, kw_only=True)
class RankSample:
    """How busy a process was at a moment."""

    at_s: float
    load: float  # processors kept busy by it and its children
    ready: bool  # it has work to do


@dataclass(kw_only=True)
class ObservedRank:
    """A rank as it was heard; times are of the watch's clock."""

    host: str
    heartbeat: Heartbeat
    since_s: float  # it has been doing just this since then
    still_s: float  # it has come to nothing new since then
    state_since_s: float
    places: set[tuple[str, str]] = field(default_factory=set)  # it was at since it moved
    groups: set[str] = field(default_factory=set)  # it is in; none: not known
    samples: deque[RankSample] = field(default_factory=deque)  # of the last seconds

    @property
    def rank(self) -> int:
        """Its number."""
        return self.heartbeat.rank

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""
        return self.heartbeat.state in ("X", "Z")

    @property
    def stopped(self) -> bool:
        """Whether its process is stopped, by a signal or by a debugger."""
        return self.heartbeat.state in ("T", "t")

    @property
    def silent(self) -> bool:
        """Whether Python has not run in it for longer than a busy machine explains."""
        return self.heartbeat.silent_s >= SILENT_S

    @property
    def may_wait(self) -> bool:
        """Whether it can be one that waits for others."""
        # Whoever waits for others lets Python run; one that does not may be on its way out.
        return not (self.stopped or self.ended or self.silent)

    @property
    def waits(self) -> bool:
        """Whether it waits for others: in a collective, or for one that it has called."""
        if not self.may_wait:
            return False
        return self.heartbeat.waiting or (bool(self.heartbeat.waits) and not self.busy)

    def is_ahead(self, least_begun: Mapping[str, int]) -> bool:
        """Say whether it stands still since it called a collective that somebody has not come to.

        ``least_begun`` is how far the last of each group is known to have come.
        """
        return self.may_wait and any(
            least_begun.get(called.group, called.number) < called.number
            for called in self.heartbeat.waits
        )

    @property
    def busy(self) -> bool:
        """Whether it or a child of it computes; where that is not known, yes.

        On a machine with too much to do, one that would compute is at least ready for it.
        """
        if not self.samples:
            return True
        mean = sum(one.load for one in self.samples) / len(self.samples)
        ready = sum(one.ready for one in self.samples) / len(self.samples)
        return mean >= BUSY_PROCESSORS or ready >= READY_MOSTLY


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Who keeps whom waiting. ``waited_s`` is how long the first of the waiting ones has waited."""

    kind: HangKind
    culprits: tuple[ObservedRank, ...]
    waiting: tuple[ObservedRank, ...]
    waited_s: float
    now_s: float

    @property
    def key(self) -> tuple[HangKind, tuple[int, ...]]:
        """What makes it the same hang at another time."""
        return self.kind, tuple(one.rank for one in self.culprits)

    @property
    def hopeless(self) -> bool:
        """Whether it cannot end well by itself, however long one waits."""
        return self.kind is HangKind.DIFFERENT
