"""Real hosts on one machine: 2 to 4, or a dozen, each with its own network, names, processes and sshd.

The hosts are plugged into a switch (a bridge) in a namespace of its own; nothing appears in the
machine's own network, and any number of labs can be up at the same time.
"""

import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from hosts import namespaces
from hosts.host import Host
from hosts.namespaces import tool
from hosts.sshd import SshFiles

BRIDGE = "br0"
_NUMBERS = itertools.count(1)


class Lab:
    """Hosts ``node1`` … on one network: ``with Lab(2) as lab: node1, node2 = lab.hosts``."""

    def __init__(self, count: int, *, ssh: bool = True) -> None:
        self.prefix = namespaces.prefix(next(_NUMBERS))
        self.switch = f"{self.prefix}switch"
        self.hosts: tuple[Host, ...] = ()
        self.ssh: SshFiles | None = None
        self._count = count
        self._with_ssh = ssh
        self._machinery: list[subprocess.Popen[bytes]] = []
        self._folder: Path | None = None

    def __enter__(self) -> "Lab":
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    @property
    def folder(self) -> Path:
        """Of the lab's own, seen by all hosts, gone with the lab."""
        assert self._folder is not None
        return self._folder

    def switch_ip(self, *words: str) -> str:
        """Run ``ip`` upon the switch; the port of nodeK is ``pK``."""
        return tool("ip", "-n", self.switch, *words)

    def plug(self, host: Host, interface: str, *, port: str, bridge: str | None) -> None:
        """Give a host an interface with a cable to the switch; without bridge it leads nowhere."""
        end = ["link", "add", interface, "netns", host.namespace, "type", "veth"]
        tool("ip", *end, "peer", "name", port, "netns", self.switch)
        if bridge is not None:
            self.switch_ip("link", "set", port, "master", bridge)
        self.switch_ip("link", "set", port, "up")
        host.ip("link", "set", interface, "up")

    def start_in_switch(self, argv: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        """Start a part of the lab's machinery, which ends with the lab, and await its first line."""
        process = subprocess.Popen(
            [*namespaces.within(self.switch), *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self._machinery.append(process)
        assert process.stdout is not None
        with process.stdout as told:
            if not told.readline():
                raise RuntimeError(f"ended at once: {argv}")
        return process

    def down(self) -> None:
        """End every process on the hosts and remove all that was made."""
        try:
            for process in self._machinery:
                process.kill()
                process.wait()
            for host in self.hosts:
                host.remove()
        finally:
            for name in namespaces.existing():
                if name.startswith(self.prefix):
                    namespaces.remove(name)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder, self._machinery = None, []

    def _up(self) -> None:
        # A short path: sockets, which programs may put there, allow about 100 characters.
        self._folder = Path(tempfile.mkdtemp(prefix=self.prefix))
        entries = {f"node{k}": f"10.77.0.{10 + k}" for k in range(1, self._count + 1)}
        tool("ip", "netns", "add", self.switch)
        self.add_bridge(BRIDGE)
        for number in range(1, self._count + 1):
            host = Host(number=number, prefix=self.prefix, folder=self._folder, entries=entries)
            self.hosts += (host,)
            self.plug(host, "eth0", port=f"p{number}", bridge=BRIDGE)
            host.ip("addr", "add", f"{host.address}/24", "dev", "eth0")
        if self._with_ssh:
            self.ssh = SshFiles(self._folder / "ssh", entries)
        for host in self.hosts:
            host.ssh = self.ssh
            host.boot()

    def add_bridge(self, name: str) -> None:
        self.switch_ip("link", "add", name, "type", "bridge")
        self.switch_ip("link", "set", name, "up")


def remove_abandoned() -> None:
    """Remove what labs left whose process was killed before it could."""
    for name in namespaces.existing():
        if namespaces.is_abandoned(name):
            namespaces.remove(name)
    for folder in Path(tempfile.gettempdir()).glob("muster*"):
        if namespaces.is_abandoned(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
