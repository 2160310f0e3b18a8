"""What is asked for, and who has claimed what: the inputs of a choice besides the snapshot."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmuster.units import GiB, MiB, format_bytes, plural

GpuId = int | str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Who has claimed a device, as the holder wrote it."""

    pid: int
    user: str
    command: str
    since_unix_s: float
    token: str = field(default="", repr=False)

    def __str__(self) -> str:
        command = self.command if len(self.command) <= 40 else self.command[:39] + "…"
        return f"{self.user} (pid {self.pid}, {command})"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for. Without ``ids`` and ``count``: every device that meets the conditions.

    ``ids`` are numbers, UUIDs or unique beginnings of UUIDs; with ``count`` as well, that many of
    them are taken. ``share`` accepts devices on which others compute; a claimed one never.
    """

    ids: tuple[GpuId, ...] | None = None
    count: int | None = None
    min_free_bytes: int | None = None
    min_total_bytes: int | None = None
    share: bool = False

    def __str__(self) -> str:
        if self.ids is None:
            text = "all GPUs" if self.count is None else plural(self.count, "GPU")
        else:
            text = ("GPU " if len(self.ids) == 1 else "GPUs ") + ", ".join(map(str, self.ids))
            text = text if self.count is None else f"{self.count} of {text}"
        conditions = []
        if self.min_free_bytes is not None:
            conditions.append(f"at least {format_bytes(self.min_free_bytes)} free")
        if self.min_total_bytes is not None:
            conditions.append(f"at least {format_bytes(self.min_total_bytes)} in all")
        return text + (f" with {' and '.join(conditions)}" if conditions else "")

    def as_flags(self) -> Sequence[str]:
        """Write it as flags of ``muster gpus pick``."""
        words: list[str] = []
        if self.ids is not None:
            words += ["--gpu-ids", *map(str, self.ids)]
        if self.count is not None:
            words += ["--num", str(self.count)]
        if self.min_free_bytes is not None:
            words += ["--min-free", _rounded_down(self.min_free_bytes)]
        if self.min_total_bytes is not None:
            words += ["--min-total", _rounded_down(self.min_total_bytes)]
        return [*words, "--share"] if self.share else words


def _rounded_down(count: int) -> str:
    """Write a size that the device which has ``count`` still meets."""
    if count < GiB:
        return f"{count // MiB}MiB"
    whole, tenths = divmod(count * 10 // GiB, 10)
    return f"{whole}.{tenths}GiB" if tenths else f"{whole}GiB"
