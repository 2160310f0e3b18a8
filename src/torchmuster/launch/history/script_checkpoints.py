"""The checkpoints that a script wrote during a run, as its rank 0 recorded them."""

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

    With ``on_other_hosts`` rank 0 ran elsewhere: the newest one may be there even if this host cannot access it.
    """
    unusable: list[tuple[str, Condition]] = []
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
