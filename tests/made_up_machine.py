"""Another machine than this one, as the checks of ``verify`` see it: files below a folder, and recorded words."""

from collections.abc import Mapping
from pathlib import Path

from torchmuster.diagnose.check import Surroundings

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
CGROUP = "sys/fs/cgroup/pod"
#: The files of a container that has a cgroup (version 2) of its own, /pod.
IN_A_CGROUP = {"proc/self/cgroup": "0::/pod\n", "proc/self/mountinfo": V2_MOUNT}


def made_up_machine(
    root: Path,
    files: Mapping[str, object] | None = None,
    *,
    system: str = "linux",
    environment: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
) -> Surroundings:
    """Write the files below ``root``; no program is started, only ``outputs`` answer."""
    for name, content in (files or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content), encoding="utf-8")
    return Surroundings(
        system=system,
        root=root,
        environment=environment or {},
        folder=root,
        outputs=outputs or {},
    )
