"""A cause of a slow training, and what the modules that look for them have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.profile import gains
from torchmuster.bench.profile.analysis import Analysis
from torchmuster.bench.profile.changes import Change, Kind, Trial

WORTH_FROM = 1.1  # a gain below this is not worth telling


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a training is slow. ``would`` begins the sentence that the gain ends."""

    name: str
    what: str
    would: str
    gain: float | None
    known_by: Literal["trace", "trial"]
    why: str
    fix: str
    evidence: str
    change: Change | None = None
    another_training: bool = False  # the mended training computes other numbers


Look = Callable[[Analysis, Sequence[Trial]], Cause | None]


def tried(trials: Sequence[Trial], kind: Kind) -> Trial | None:
    """Return what trying a kind of change has shown, if it was tried."""
    return next((one for one in trials if one.change.kind == kind), None)


def confirmed(trial: Trial, least: float = WORTH_FROM) -> bool:
    """Tell whether a trial shows a gain: large enough, and no run with the change was slower than one without."""
    return trial.gain >= least and trial.low > 1.0


def share_s(analysis: Analysis, place: int, phase: str) -> float:
    """Return what a phase takes on one rank; on a device only what the device idles for it."""
    return analysis.ranks[place].shares.by_name()[phase]


def on_device_gain(analysis: Analysis, phase: str, left: float = 0.0) -> float:
    """Return the gain on devices, which all wait for the one that has least of it."""
    traced = [one for one in analysis.ranks if one.trace is not None and one.trace.on_device]
    if not traced:
        return 1.0
    return 1 / (1 - min(one.shares.part(phase) for one in traced) * (1 - left))


def phase_gain(analysis: Analysis, phase: str, *, left: float) -> float:
    """Return the gain if a phase took only a part of its time on every rank."""
    if any(one.trace is not None and one.trace.on_device for one in analysis.ranks):
        return on_device_gain(analysis, phase, left)
    return gains.of_phase(analysis.steps, phase, left=left)
