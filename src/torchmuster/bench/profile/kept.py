"""What a profile's folder keeps beside facts and traces: the question, and what trials have shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from torchmuster.bench.profile.changes import Trial
from torchmuster.bench.profile.recording_words import ASKED, Asked
from torchmuster.errors import MusterError

_TRIALS = "trials.json"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Trials:
    trials: tuple[Trial, ...]
    proof: Trial | None


def write_trials(folder: Path, trials: Sequence[Trial], proof: Trial | None) -> None:
    """Keep what trials have shown, and what ``--verify`` has."""
    kept = _Trials(trials=tuple(trials), proof=proof)
    (folder / _TRIALS).write_bytes(msgspec.json.encode(kept))


def read_trials(folder: Path) -> tuple[tuple[Trial, ...], Trial | None]:
    """Return what was kept; nothing where no trial was made."""
    if not (folder / _TRIALS).exists():
        return (), None
    kept = _decoded(folder / _TRIALS, _Trials)
    return kept.trials, kept.proof


def read_asked(folder: Path) -> Asked:
    """Return the question of a profile."""
    return _decoded(folder / ASKED, Asked)


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, OSError) as error:
        raise MusterError(
            f"{path} cannot be read",
            why=str(error),
            fix="name a folder that muster profile has written, or profile again",
        ) from error
