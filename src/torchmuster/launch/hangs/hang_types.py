"""Types of the hang detector: observed ranks and hangs."""

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.units import format_seconds

# A process that uses fewer CPUs than this is waiting.
BUSY_PROCESSORS = 0.1


READY_MOSTLY = 0.8


SILENT_S = 6.0


class HangKind(enum.Enum):
    """What keeps a rank from reaching a collective, most certain first."""

    DIFFERENT = "different"  # the ranks called different collectives, which can never match
    STOPPED = "stopped"  # by a signal or a debugger
    ENDED = "ended"
    NATIVE = "native"  # in native code that holds the GIL
    DISK = "disk"  # in the kernel: a disk, a network file system, a driver
    ASLEEP = "asleep"
    AT_WORK = "at work"
    UNEQUAL = "unequal"  # all wait, but not in the same collective
    TOGETHER = "together"  # all wait in the same one
    UNSEEN = "unseen"  # all that were looked at wait; the others are on other hosts


ALL_WAIT = frozenset({HangKind.DIFFERENT, HangKind.UNEQUAL, HangKind.TOGETHER, HangKind.UNSEEN})


@dataclass(frozen=True, kw_only=True)
class RankSample:
    """How busy a process was at one moment."""

    at_s: float
    load: float  # CPUs used by it and its children
    ready: bool  # it has work to do


@dataclass(kw_only=True, eq=False)
class ObservedRank:
    """A rank as seen through its heartbeats; times are of the watch's clock."""

    host: str
    heartbeat: Heartbeat
    since_s: float  # it has been doing the same since then
    still_s: float  # no progress since then
    state_since_s: float
    places: set[tuple[str, str]] = field(default_factory=set)  # visited since its last progress
    groups: set[str] = field(default_factory=set)  # its process groups; none: unknown
    samples: deque[RankSample] = field(default_factory=deque)  # of the last seconds

    def forget_wait(self, now_s: float) -> None:
        """Forget what the rank waited for: it has made progress since its last heartbeat."""
        self.heartbeat = msgspec.structs.replace(
            self.heartbeat, state="", waiting=False, waits=(), begun={}, silent_s=0.0
        )
        self.state_since_s = now_s

    @property
    def rank(self) -> int:
        """The rank number."""
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
        """Whether Python has not run in it for longer than a busy host explains."""
        return self.heartbeat.silent_s >= SILENT_S

    @property
    def may_wait(self) -> bool:
        """Whether it may be waiting for other ranks."""
        # A rank that waits in a collective lets Python run; one that does not may be exiting.
        return not (self.stopped or self.ended or self.silent)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks: in a collective, or for one that it has called."""
        if not self.may_wait:
            return False
        return self.heartbeat.waiting or (bool(self.heartbeat.waits) and not self.busy)

    def is_ahead(self, least_begun: Mapping[str, int]) -> bool:
        """Return whether it is stuck in a collective that another rank has not reached.

        ``least_begun`` is the lowest known collective number of each group.
        """
        return self.may_wait and any(
            least_begun.get(called.group, called.number) < called.number
            for called in self.heartbeat.waits
        )

    @property
    def busy(self) -> bool:
        """Whether it or a child process computes; True if unknown.

        On an overloaded host, a process that wants to compute is at least in state R.
        """
        if not self.samples:
            return True
        mean = sum(one.load for one in self.samples) / len(self.samples)
        ready = sum(one.ready for one in self.samples) / len(self.samples)
        return mean >= BUSY_PROCESSORS or ready >= READY_MOSTLY


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Which ranks keep which waiting. ``waited_s`` is how long the first waiting rank has waited."""

    kind: HangKind
    culprits: tuple[ObservedRank, ...]
    waiting: tuple[ObservedRank, ...]
    waited_s: float
    now_s: float
    unseen: tuple[int, ...] = ()  # ranks of the job that were not looked at
    at_least: bool = False  # it began before the ranks were first seen

    def duration(self, seconds: float) -> str:
        """Return how long something has lasted, as text: ``12 s``, or ``at least 12 s``."""
        return f"{'at least ' if self.at_least else ''}{format_seconds(max(0.0, seconds))}"

    @property
    def key(self) -> tuple[HangKind, tuple[int, ...]]:
        """Identity of the hang, the same over time."""
        return self.kind, tuple(one.rank for one in self.culprits)

    @property
    def hopeless(self) -> bool:
        """Whether it can never resolve itself."""
        return self.kind is HangKind.DIFFERENT
