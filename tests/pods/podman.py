"""Podman with the settings that work in a container or a virtual machine, and names that no two labs share."""

import itertools
import os
import re
import subprocess
from pathlib import Path

import psutil

from patience import GIVE_UP_S

#: crun refuses the hybrid cgroup mode, and the default limits are refused without CAP_SYS_RESOURCE.
CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
"""
#: Podman label with the name of the lab that created a pod, a network or an image.
LABEL = "torchmuster-lab"
NEEDS = ("podman", "runc", "iptables")
INSTALL = "apt-get install podman runc netavark aardvark-dns catatonit iptables"
_OURS = re.compile(r"podlab(\d+)-\d+")
_numbers = itertools.count()


class Podman:
    """The ``podman`` command with a settings file of its own; the host's settings stay as they are."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._conf = folder / "containers.conf"
        self._conf.write_text(CONF)

    def __call__(self, *arguments: object, may_fail: bool = False) -> str:
        """Run podman and return its standard output; raise if it fails."""
        words = ["podman", *map(str, arguments)]
        done = subprocess.run(
            words,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * GIVE_UP_S,
        )
        if done.returncode != 0 and not may_fail:
            raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def start(self, *arguments: object) -> subprocess.Popen[bytes]:
        """Start podman in the background; the caller waits for it."""
        return subprocess.Popen(
            ["podman", *map(str, arguments)],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which podman runs."""
        return {**os.environ, "CONTAINERS_CONF": str(self._conf)}


def lab_name() -> str:
    """Return a name for a lab, with the pid of this process."""
    return f"podlab{os.getpid()}-{next(_numbers)}"


def remove_abandoned(podman: Podman) -> None:
    """Remove what labs of processes that no longer exist have left."""
    for line in Path("/proc/mounts").read_text().splitlines():
        source, target = line.split()[:2]
        if _is_abandoned(source):
            subprocess.run(["umount", target], capture_output=True)
    listed = podman("pod", "ps", "--filter", f"label={LABEL}", "--format", "{{.Labels}}")
    listed += podman("network", "ls", "--filter", f"label={LABEL}", "--format", "{{.Name}}")
    listed += podman("images", "--filter", f"label={LABEL}", "--format", "{{.Repository}}")
    for name in {match[0] for match in _OURS.finditer(listed)}:
        if _is_abandoned(name):
            remove_lab(podman, name)


def remove_lab(podman: Podman, name: str) -> None:
    """Remove the pods, networks and images of a lab, and nothing else."""
    ours = f"label={LABEL}={name}"
    if pods := podman("pod", "ps", "-q", "--filter", ours).split():
        podman("pod", "rm", "-f", "-t", "0", *pods, may_fail=True)
    if networks := podman("network", "ls", "-q", "--filter", ours).split():
        podman("network", "rm", "-f", *networks, may_fail=True)
    images = podman("images", "--filter", ours, "--format", "{{.Repository}}:{{.Tag}}").split()
    if images := [image for image in images if "<none>" not in image]:
        podman("rmi", "-f", *images, may_fail=True)


def _is_abandoned(name: str) -> bool:
    ours = _OURS.fullmatch(name)
    return ours is not None and not psutil.pid_exists(int(ours[1]))
