"""What the driver and the kernel say of a rank's device while it works."""

from pathlib import Path

from torchmuster.devices import snapshot
from torchmuster.devices.readers.cpu import PROC, SYS, cgroup_folders
from torchmuster.diagnose.rank_record import Health


def device_health(uuid: str | None) -> Health:
    """Return temperature and throttling of a GPU, by its UUID; nothing is known of a CPU."""
    if uuid is None:
        return Health()
    for device in snapshot.take().accelerators:
        if uuid in device.uuid:
            return Health(
                temperature_c=device.temperature_c,
                slowdown_temperature_c=device.slowdown_temperature_c,
                throttled_by=device.throttled_by,
            )
    return Health()


class Quota:
    """How often the kernel held this process's cgroups back since this was made."""

    def __init__(self, proc_root: Path = PROC, sys_root: Path = SYS) -> None:
        self._folders = list(cgroup_folders("cpu", proc_root, sys_root))
        self._before = [_periods(folder) for folder in self._folders]

    def held_back(self) -> float | None:
        """Return the largest share of periods that were cut short; None if there is no quota."""
        shares = [
            (after[1] - before[1]) / (after[0] - before[0])
            for before, after in zip(self._before, map(_periods, self._folders), strict=True)
            if before and after and after[0] > before[0]
        ]
        return max(shares, default=None)


def _periods(folder: Path) -> tuple[int, int] | None:
    """Return how many periods of a quota have passed, and in how many of them it was used up."""
    try:
        text = (folder / "cpu.stat").read_text(encoding="ascii")
    except OSError:
        return None
    counts = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    try:
        return int(counts["nr_periods"]), int(counts["nr_throttled"])
    except (KeyError, ValueError):
        return None
