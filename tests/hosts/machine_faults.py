"""What goes wrong within a machine, as data: each fault is applied to one host of a lab and undone.

They are real: a small file system is mounted, a limit is set, a control group is made. What a host
cannot have for itself (a kernel of another kind, a GPU) is seen by it: a file is mounted over the
kernel's own, a library stands in for the driver's. A fault takes hold of what starts afterwards.
"""

import os
import resource
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import nvml_stub
from hosts.faults import Undo
from hosts.host import Host
from hosts.lab import Lab
from hosts.namespaces import await_true
from nvml_stub.scenarios import Scenario

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Variables:
    """The host's environment has these variables, for all that starts there."""

    host: str
    values: Mapping[str, str]

    def apply(self, lab: Lab) -> Undo:
        host = lab.host(self.host)
        before = {name: host.variables.get(name) for name in self.values}
        host.set(**self.values)
        return lambda: host.set(**before)


@dataclass(frozen=True, kw_only=True)
class SmallFileSystem:
    """A folder of the host is a file system of its own of this size, and so many bytes are used.

    A path that is not absolute is below the lab's folder.
    """

    host: str
    path: str
    size_bytes: int
    used_bytes: int = 0
    read_only: bool = False

    def apply(self, lab: Lab) -> Undo:
        host = lab.host(self.host)
        path = str(lab.folder / self.path)
        options = f"size={self.size_bytes}"
        host.run(["mkdir", "-p", path], check=True)
        host.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
        if self.used_bytes:
            fill = f"head -c {self.used_bytes} /dev/zero > {path}/filled"
            host.run(["sh", "-c", fill], check=True)
        if self.read_only:
            host.run(["mount", "-o", "remount,ro", path], check=True)

        def undo() -> None:
            host.run(["umount", "-l", path], check=True)

        return undo


@dataclass(frozen=True, kw_only=True)
class FileReads:
    """On the host a file has another content: the kernel's own files too, as it shows them."""

    host: str
    path: str
    text: str

    def apply(self, lab: Lab) -> Undo:
        host = lab.host(self.host)
        handle, name = tempfile.mkstemp(dir=lab.folder)
        with os.fdopen(handle, "w") as file:
            file.write(self.text)
        Path(name).chmod(0o644)
        host.run(["mount", "--bind", name, self.path], check=True)

        def undo() -> None:
            host.run(["umount", "-l", self.path], check=True)

        return undo


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What is called over ssh may use only so much: ``Limit(host=…, name="RLIMIT_NOFILE", most=256)``."""

    host: str
    name: str
    most: int

    def apply(self, lab: Lab) -> Undo:
        server = lab.host(self.host).sshd_pid
        kind = getattr(resource, self.name)
        before = resource.prlimit(server, kind)
        resource.prlimit(server, kind, (self.most, before[1]))
        return lambda: _restore_limit(server, kind, before)


def _restore_limit(pid: int, kind: int, limits: tuple[int, int]) -> None:
    resource.prlimit(pid, kind, limits)


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """What is called over ssh belongs to a control group with these settings, as in a container."""

    host: str
    controller: str
    settings: Mapping[str, str]

    def apply(self, lab: Lab) -> Undo:
        host = lab.host(self.host)
        server = host.sshd_pid
        _show_groups(host, self.controller)
        home = _CGROUPS / self.controller
        mine = _membership(server, self.controller)
        group = home / f"{lab.prefix}{self.host}"
        group.mkdir()
        for name, value in self.settings.items():
            (group / name).write_text(value)
        (group / "cgroup.procs").write_text(str(server))

        def is_empty() -> bool:
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):  # a session on its way out
                    (home / mine.lstrip("/") / "cgroup.procs").write_text(pid)
            return not (group / "cgroup.procs").read_text()

        def undo() -> None:
            await_true("the control group is empty", is_empty)
            group.rmdir()
            host.run(["umount", "-R", "-l", str(_CGROUPS)], check=True)

        return undo


def _show_groups(host: Host, controller: str) -> None:
    """Mount the controller's groups where programs look for them: a host's /sys is bare."""
    folder = str(_CGROUPS / controller)
    host.run(["mount", "-t", "tmpfs", "tmpfs", str(_CGROUPS)], check=True)
    host.run(["mkdir", folder], check=True)
    host.run(["mount", "-t", "cgroup", "-o", controller, "cgroup", folder], check=True)


def _membership(pid: int, controller: str) -> str:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    raise LookupError(f"no control group for {controller}")


@dataclass(frozen=True, kw_only=True)
class OnlyCore:
    """What is called over ssh may use one core only."""

    host: str

    def apply(self, lab: Lab) -> Undo:
        server = lab.host(self.host).sshd_pid
        before = os.sched_getaffinity(server)
        os.sched_setaffinity(server, {min(before)})
        return lambda: os.sched_setaffinity(server, before)


@dataclass(frozen=True, kw_only=True)
class Packages:
    """Python on the host finds these files before its own packages: a broken torch, another NumPy."""

    host: str
    files: Mapping[str, str]

    def apply(self, lab: Lab) -> Undo:
        folder = Path(tempfile.mkdtemp(dir=lab.folder))
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        undo = Variables(host=self.host, values={"PYTHONPATH": str(folder)}).apply(lab)

        def undone() -> None:
            undo()
            shutil.rmtree(folder)

        return undone


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The host has GPUs, as the driver's library tells of them."""

    host: str
    scenario: Scenario
    others: Mapping[str, str] = field(default_factory=dict)

    def apply(self, lab: Lab) -> Undo:
        folder = lab.folder / "nvml"
        if not folder.exists():
            folder.mkdir()
            nvml_stub.build(folder)
        path = nvml_stub.write(lab.folder / f"gpus-{self.host}.json", self.scenario)
        values = {
            "LD_LIBRARY_PATH": str(folder),
            nvml_stub.SCENARIO_VARIABLE: str(path),
            **self.others,
        }
        return Variables(host=self.host, values=values).apply(lab)


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """The host's cable carries only so much, in both directions."""

    host: str
    mbits: int = 100

    def apply(self, lab: Lab) -> Undo:
        host = lab.host(self.host)
        shaped: Sequence[tuple[str, str]] = (
            (host.namespace, "eth0"),
            (lab.switch, f"p{host.number}"),
        )
        for namespace, interface in shaped:
            _tc(namespace, "add", interface, f"rate {self.mbits}mbit burst 64k latency 50ms")

        def undo() -> None:
            for namespace, interface in shaped:
                _tc(namespace, "del", interface, "")

        return undo


def _tc(namespace: str, verb: str, interface: str, words: str) -> None:
    from hosts.namespaces import tool

    kind = ["tbf", *words.split()] if words else []
    tool("tc", "-n", namespace, "qdisc", verb, "dev", interface, "root", *kind)


@dataclass(frozen=True, kw_only=True)
class NoRoute:
    """The host has lost its way to the network the others are on."""

    host: str
    target: str

    def apply(self, lab: Lab) -> Undo:
        host, target = lab.host(self.host), lab.host(self.target).address
        host.ip("route", "add", "unreachable", target)
        # Whatever has taken its place, nothing but the way to all others is left.
        return lambda: _quiet(host.ip("route", "flush", "exact", f"{target}/32"))


def _quiet(_: object) -> None:
    """Take what a command said, which nobody needs."""


@dataclass(frozen=True, kw_only=True)
class SilentNameServer:
    """The host asks a name server that never answers."""

    host: str

    def apply(self, lab: Lab) -> Undo:
        file = lab.host(self.host).hosts_file.with_name("resolv.conf")
        before = file.read_text()
        server = next(one for one in lab.hosts if one.name != self.host)
        server.iptables("-I", "INPUT", "-p", "udp", "--dport", "53", "-j", "DROP")
        file.write_text(f"nameserver {server.address}\n")

        def undo() -> None:
            file.write_text(before)
            server.iptables("-D", "INPUT", "-p", "udp", "--dport", "53", "-j", "DROP")

        return undo
