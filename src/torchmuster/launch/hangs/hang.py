"""A hang: its kind, and which ranks keep which waiting."""

import enum
from dataclasses import dataclass

from torchmuster.launch.hangs.observation import Observation
from torchmuster.units import format_seconds


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
