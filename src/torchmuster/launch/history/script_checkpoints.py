"""The checkpoints that a script wrote during a run, as its rank 0 recorded them."""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchmuster import untrusted
from torchmuster.checkpoints.foreign import Completeness, Condition, condition_of
from torchmuster.launch.history.run_state import UnixTime, read_as

SAVES = "saves.jsonl"
# Scripts also save small things with torch.save, such as losses: a smaller share of the largest file is no checkpoint.
_SMALL_SHARE = 0.1
_MOST_NEIGHBOURS = 10_000


class ScriptCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint: a file, a folder or a URL."""

    step: int
    path: str
    library: str  # transformers, lightning, accelerate, deepspeed, DCP, torch.save
    at_unix_s: UnixTime
    size_bytes: int | None = msgspec.field(name="bytes", default=None)

    @property
    def condition(self) -> Condition:
        """Whether it is complete, by its files as they are now."""
        return condition_of(self.path, self.library)


def checkpoint_from(line: Mapping[str, object]) -> ScriptCheckpoint | None:
    """Return the checkpoint that a line of ``saves.jsonl`` describes; None for a save of ``muster train``."""
    return read_as(line, ScriptCheckpoint)


def read_script_checkpoints(metrics: Path) -> list[ScriptCheckpoint]:
    """Return the checkpoints of a run, newest first; one that was overwritten counts once."""
    by_path: dict[str, ScriptCheckpoint] = {}
    for line in untrusted.read_json_lines(metrics / SAVES):
        if found := checkpoint_from(line):
            by_path.pop(found.path, None)
            by_path[found.path] = found
    return list(reversed(_without_small_files(by_path.values())))


def lost_saves(metrics: Path) -> list[int]:
    """Return the steps whose saves failed, and which no later attempt saved."""
    lost: set[int] = set()
    for line in untrusted.read_json_lines(metrics / SAVES):
        step = line.get("step")
        if isinstance(step, int):
            (lost.add if line.get("problem") else lost.discard)(step)
    return sorted(lost)


def _without_small_files(found: Iterable[ScriptCheckpoint]) -> list[ScriptCheckpoint]:
    found = list(found)
    files = [one.size_bytes or 0 for one in found if one.library == "torch.save"]
    least = _SMALL_SHARE * max(files, default=0)
    return [one for one in found if one.library != "torch.save" or (one.size_bytes or 0) >= least]


def saved_after(metrics: Path, since_unix_s: float) -> bool:
    """Return whether a complete checkpoint was recorded after a moment, such as a stop request."""
    return any(
        one.at_unix_s >= since_unix_s and one.condition.state is Completeness.COMPLETE
        for one in read_script_checkpoints(metrics)
    )


@dataclass(frozen=True, kw_only=True)
class NewestCheckpoints:
    """The newest checkpoint to resume from, and newer ones that cannot be used, with the reason."""

    usable: ScriptCheckpoint | None = None
    unusable: tuple[tuple[str, Condition], ...] = ()


def newest_usable(
    checkpoints: Sequence[ScriptCheckpoint], *, on_other_hosts: bool = False
) -> NewestCheckpoints:
    """Find the newest complete checkpoint, given newest first.

    With ``on_other_hosts`` rank 0 ran elsewhere: the newest one may be there even if this host cannot access it. Also
    checks for a folder or file that was begun after the newest checkpoint and never finished.
    """
    unusable: list[tuple[str, Condition]] = []
    for place, one in enumerate(checkpoints):
        if place == 0 and (begun := _begun_after(one, {known.path for known in checkpoints})):
            unusable.append(begun)
        found = one.condition
        unseen = on_other_hosts and found.state is Completeness.MISSING and place == 0
        if found.state is Completeness.COMPLETE or unseen or "://" in one.path:
            return NewestCheckpoints(usable=one, unusable=tuple(unusable))
        if found.state is not Completeness.MISSING:  # scripts delete old ones
            unusable.append((one.path, found))
    return NewestCheckpoints(unusable=tuple(unusable))


def _begun_after(newest: ScriptCheckpoint, known: set[str]) -> tuple[str, Condition] | None:
    """Return an incomplete checkpoint with a similar name that is newer than the given one.

    A rank records a checkpoint when it is written; one during which the rank was killed is found only here.
    """
    path = Path(newest.path)
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(path.name)))
    younger: list[tuple[float, str]] = []
    with contextlib.suppress(OSError):
        for place, other in enumerate(path.parent.iterdir()):
            if place >= _MOST_NEIGHBOURS:
                break
            if str(other) not in known and pattern.fullmatch(other.name):
                younger.append((other.stat().st_mtime, str(other)))
    for at_unix_s, name in sorted(younger, reverse=True):
        if at_unix_s < newest.at_unix_s:
            break
        if (found := condition_of(name, newest.library)).state is Completeness.TORN:
            return name, found
    return None
