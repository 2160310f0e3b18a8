"""What is known of one rank over time, its last heartbeat and since when it has not moved; and a hang of several ranks."""

import enum
from collections import deque
from dataclasses import dataclass, field

from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.units import format_seconds

# A process that uses fewer CPUs than this is waiting.
BUSY_PROCESSORS = 0.1
# A process that was ready to run this often wants a CPU, even if it got none on an overloaded host.
_READY_SHARE = 0.8
# Without a beat of Python for longer than a busy host explains.
_SILENT_S = 6.0
_SAMPLES_FOR_S = 10.0
_MOVES_SEEN = 3
# Phases that one rank may spend alone for a while, using little CPU.
_LONG_PHASES = ("saving", "evaluating", "compiling")


@dataclass(frozen=True, kw_only=True)
class _CpuSample:
    at_s: float
    load: float  # CPUs used by the process and its children
    is_ready: bool  # it has work to do


@dataclass(kw_only=True, eq=False)
class Observation:
    """A rank as seen through its heartbeats; all times are of the same clock.

    ``same_since_s`` is when it last changed in any way, ``still_since_s`` when it last made progress: a rank that polls
    alternates between a few lines without getting further.
    """

    host: str
    heartbeat: Heartbeat
    same_since_s: float
    still_since_s: float
    state_since_s: float
    places: set[tuple[str, str]] = field(default_factory=set)  # visited since its last progress
    groups: set[str] = field(default_factory=set)  # its process groups; none: unknown
    samples: deque[_CpuSample] = field(default_factory=deque)

    @classmethod
    def first(cls, host: str, heartbeat: Heartbeat, now_s: float) -> "Observation":
        """Begin to observe a process."""
        return cls(
            host=host,
            heartbeat=heartbeat,
            same_since_s=now_s,
            still_since_s=now_s,
            state_since_s=now_s,
        )

    def update(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take in another heartbeat of the same process."""
        before, self.heartbeat = self.heartbeat, heartbeat
        self.groups.update(heartbeat.groups, heartbeat.begun)
        if heartbeat.state != before.state:
            self.state_since_s = now_s
        if progress_of(heartbeat) != progress_of(before):
            self.same_since_s = now_s
        has_moved = heartbeat.moves != before.moves
        # If progress cannot be seen, every change of place counts.
        if has_moved or heartbeat.moves < _MOVES_SEEN:
            self.places.clear()
        place = (heartbeat.place, heartbeat.doing)
        is_new_place = place not in self.places and place != (before.place, before.doing)
        if has_moved or is_new_place:
            self.still_since_s = now_s
        self.places.add(place)
        if heartbeat.busy is not None:
            is_ready = heartbeat.state == "R"
            self.samples.append(_CpuSample(at_s=now_s, load=heartbeat.busy, is_ready=is_ready))
            while self.samples[0].at_s < now_s - _SAMPLES_FOR_S:
                self.samples.popleft()

    @property
    def rank(self) -> int:
        """The rank number."""
        return self.heartbeat.rank

    @property
    def has_exited(self) -> bool:
        """Whether its process is gone."""
        return self.heartbeat.state in ("X", "Z")

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped, by a signal or by a debugger."""
        return self.heartbeat.state in ("T", "t")

    @property
    def is_silent(self) -> bool:
        """Whether Python cannot run in it: native code holds the GIL, or it is exiting."""
        return self.heartbeat.silent_s >= _SILENT_S

    @property
    def may_wait(self) -> bool:
        """Whether it may be waiting for other ranks; a rank that waits in a collective lets Python run."""
        return not (self.is_stopped or self.has_exited or self.is_silent)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks: in a collective, or for one that it has called."""
        if not self.may_wait:
            return False
        return self.heartbeat.waiting or (bool(self.heartbeat.waits) and not self.is_busy)

    @property
    def is_busy(self) -> bool:
        """Whether it or a child process computes; True if unknown."""
        if not self.samples:
            return True
        load = sum(sample.load for sample in self.samples) / len(self.samples)
        ready = sum(sample.is_ready for sample in self.samples) / len(self.samples)
        return load >= BUSY_PROCESSORS or ready >= _READY_SHARE

    def is_in_kernel(self, now_s: float) -> bool:
        """Return whether it has been waiting in the kernel: for a disk, a network file system or a driver."""
        return self.heartbeat.state == "D" and now_s - self.state_since_s >= _SILENT_S

    def is_at_work(self, now_s: float) -> bool:
        """Return whether it may only need more time: it computes, saves, evaluates or compiles."""
        if self.is_in_kernel(now_s):
            return False
        return self.is_busy or self.heartbeat.phase in _LONG_PHASES


def progress_of(heartbeat: Heartbeat) -> tuple[object, ...]:
    """Return the values that change when a rank makes progress."""
    return (
        heartbeat.pid,
        heartbeat.moves,
        heartbeat.step,
        heartbeat.phase,
        heartbeat.place,
        heartbeat.doing,
    )


class HangKind(enum.Enum):
    """Why a collective does not finish."""

    STOPPED = "stopped"  # a rank was stopped, by a signal or a debugger
    EXITED = "exited"  # a rank has exited
    ELSEWHERE = "elsewhere"  # a rank does something else
    DIFFERENT = "different"  # the ranks called different collectives, or a different number of them
    ALL_WAIT = "all wait"  # all ranks that were seen called it


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Which ranks keep which waiting, and for how long the first one has waited."""

    kind: HangKind
    culprits: tuple[Observation, ...]
    waiting: tuple[Observation, ...]
    waited_s: float
    now_s: float
    is_hopeless: bool = False  # it can never resolve itself
    unseen: tuple[int, ...] = ()  # ranks of the job that were not looked at
    from_stacks: bool = False  # it began before the ranks were first looked at

    @property
    def has_culprit(self) -> bool:
        """Whether some ranks keep others waiting; else all wait for each other."""
        return self.kind not in (HangKind.DIFFERENT, HangKind.ALL_WAIT)

    @property
    def key(self) -> tuple[HangKind, tuple[int, ...]]:
        """Identity of the hang, the same over time."""
        return self.kind, tuple(rank.rank for rank in self.culprits)

    def duration(self, seconds: float) -> str:
        """Return how long something has lasted, as text: ``12 s``, or ``at least 12 s``."""
        text = format_seconds(max(0.0, seconds))
        return f"at least {text}" if self.from_stacks else text
