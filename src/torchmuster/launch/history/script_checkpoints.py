"""The checkpoints that a script wrote during a run, as its rank 0 recorded them."""

import contextlib
import itertools
import re
from collections.abc import Mapping, Sequence
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
        checkpoint = checkpoint_from(line)
        if checkpoint is not None:
            by_path.pop(str(line.get("renamed_from")), None)
            by_path.pop(checkpoint.path, None)
            by_path[checkpoint.path] = checkpoint
    largest = 0
    for checkpoint in by_path.values():
        if checkpoint.library == "torch.save":
            largest = max(largest, checkpoint.size_bytes or 0)
    newest_first = []
    for checkpoint in reversed(by_path.values()):
        size = checkpoint.size_bytes or 0
        if checkpoint.library != "torch.save" or size >= _SMALL_SHARE * largest:
            newest_first.append(checkpoint)
    return newest_first


def lost_saves(metrics: Path) -> list[int]:
    """Return the steps whose saves failed, and which no later attempt saved."""
    lost: set[int] = set()
    for line in untrusted.read_json_lines(metrics / SAVES):
        step = line.get("step")
        if not isinstance(step, int):
            continue
        if line.get("problem"):
            lost.add(step)
        else:
            lost.discard(step)
    return sorted(lost)


def saved_after(metrics: Path, since_unix_s: float) -> bool:
    """Return whether a complete checkpoint was recorded after a moment, such as a stop request."""
    for checkpoint in read_script_checkpoints(metrics):
        is_new = checkpoint.at_unix_s >= since_unix_s
        if is_new and checkpoint.condition.state is Completeness.COMPLETE:
            return True
    return False


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
    if checkpoints:
        unfinished = _begun_after(checkpoints[0], {known.path for known in checkpoints})
        if unfinished is not None:
            unusable.append(unfinished)
    for index, checkpoint in enumerate(checkpoints):
        condition = checkpoint.condition
        is_missing = condition.state is Completeness.MISSING
        may_be_elsewhere = on_other_hosts and is_missing and index == 0
        is_url = "://" in checkpoint.path
        if condition.state is Completeness.COMPLETE or may_be_elsewhere or is_url:
            return NewestCheckpoints(usable=checkpoint, unusable=tuple(unusable))
        if not is_missing:  # scripts delete old ones
            unusable.append((checkpoint.path, condition))
    return NewestCheckpoints(unusable=tuple(unusable))


def _begun_after(newest: ScriptCheckpoint, known: set[str]) -> tuple[str, Condition] | None:
    """Return an incomplete checkpoint with a similar name that is newer than the given one.

    A rank records a checkpoint when it is written; one during which the rank was killed is known only here.
    """
    path = Path(newest.path)
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(path.name)))
    younger: list[tuple[float, str]] = []
    with contextlib.suppress(OSError):
        for neighbour in itertools.islice(path.parent.iterdir(), _MOST_NEIGHBOURS):
            if str(neighbour) in known or not pattern.fullmatch(neighbour.name):
                continue
            written_unix_s = neighbour.stat().st_mtime
            if written_unix_s >= newest.at_unix_s:
                younger.append((written_unix_s, str(neighbour)))
    for _, name in sorted(younger, reverse=True):
        condition = condition_of(name, newest.library)
        if condition.state is Completeness.TORN:
            return name, condition
    return None
