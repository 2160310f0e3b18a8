"""One host of a lab: a network, a mount, a pid and a uts namespace, and the commands that run there.

So it has its own interfaces and firewall, its own ``/etc/hosts``, hostname, machine and boot id, and
sees no other host's processes: a program that looks for leftovers on "this machine" finds its own only.
Files and users are shared by all. A host's first process dies with the process that made the lab, and
with it all that runs there, even when that process is killed.
"""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hosts import namespaces
from hosts.namespaces import await_true, tool
from hosts.sshd import PORT as SSH_PORT
from hosts.sshd import SshFiles
from patience import GIVE_UP_S

_ENTER = Path(__file__).with_name("enter.py")
# Whatever the machine has set for its own GPUs is not meant for the hosts.
_NOT_INHERITED = re.compile(r"TORCHMUSTER_.*|.*_VISIBLE_DEVICES|LD_PRELOAD|SSH_.*")
_UNSHARE = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
# The first process of a host: ignoring SIGCHLD, it leaves no zombie of what is orphaned to it.
_INIT = """set -e
hostname "$1"
mount --bind "$2" /proc/sys/kernel/random/boot_id
trap "" CHLD
echo up
exec sleep infinity
"""


class HostProcess(subprocess.Popen[str]):
    """A command that runs on a host. Signals go to the command itself."""

    def __init__(self, init_pid: int, argv: Sequence[str | Path], **options: Any) -> None:
        reading, writing = os.pipe()
        enter = [sys.executable, "-I", "-S", str(_ENTER), str(init_pid), str(writing)]
        kept = (writing, *options.pop("pass_fds", ()))
        try:
            super().__init__([*enter, *argv], text=True, pass_fds=kept, **options)
        finally:
            os.close(writing)
            with os.fdopen(reading) as told:
                pid = told.read()
        if not pid:
            self.communicate()
            raise RuntimeError(f"could not be started on the host: {argv}")
        #: Of the command, as this machine counts; ``pid`` is that of its parent outside of the host.
        self.command_pid = int(pid)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.command_pid, sig)

    def interrupt(self) -> None:
        """Do what Ctrl-C does: SIGINT to the command and to all in its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.command_pid, signal.SIGINT)


class Host:
    """One host of a lab."""

    def __init__(
        self, *, number: int, prefix: str, folder: Path, entries: Mapping[str, str]
    ) -> None:
        self.number = number
        self.name = f"node{number}"
        self.address = entries[self.name]
        self.namespace = f"{prefix}{self.name}"
        self.folder = folder / self.name
        self.folder.mkdir()
        #: What every process here has in its environment, remote sessions included; see `set`.
        self.variables = {
            "TORCHMUSTER_CLAIMS_DIR": str(self.folder / "claims"),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }
        self.ssh: SshFiles | None = None
        self._init: subprocess.Popen[str] | None = None
        self._init_pid = 0
        self._sshd: HostProcess | None = None
        self._started: list[HostProcess] = []
        self._write_names(entries)
        tool("ip", "netns", "add", self.namespace)
        self.ip("link", "set", "lo", "up")

    def run(
        self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, by default with its output captured."""
        timeout_s = options.pop("timeout", GIVE_UP_S)
        given = options.pop("input", None)
        check = options.pop("check", False)
        for stream in ("stdout", "stderr"):
            options.setdefault(stream, subprocess.PIPE)
        options.setdefault("stdin", subprocess.DEVNULL if given is None else subprocess.PIPE)
        with self.popen(argv, env=env, **options) as process:
            try:
                out, err = process.communicate(given, timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def popen(
        self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> HostProcess:
        """Start a command here, with `environment` and what ``env`` adds to it."""
        if not self.is_up:
            raise RuntimeError(f"{self.name} is not up")
        environment = {**self.environment(), **(env or {})}
        process = HostProcess(self._init_pid, argv, env=environment, **options)
        self._started.append(process)
        return process

    def environment(self) -> dict[str, str]:
        """Return what a shell on this host would have: its variables, and ``ssh`` of the lab."""
        inherited = {k: v for k, v in os.environ.items() if not _NOT_INHERITED.fullmatch(k)}
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        if self.ssh is not None:
            path.insert(0, str(self.ssh.programs))
        return {**inherited, "PATH": os.pathsep.join(path), **self.variables}

    def set(self, **variables: str | None) -> None:
        """Set variables for all that starts here from now on, also by ssh; None takes one away."""
        for name, value in variables.items():
            if value is None:
                self.variables.pop(name, None)
            else:
                self.variables[name] = value
        if self._sshd is not None:
            self.stop_sshd()
            self.start_sshd()

    @property
    def sshd_pid(self) -> int:
        """Of the ssh server, as this machine counts: what it is given, all its sessions have."""
        assert self._sshd is not None
        return self._sshd.command_pid

    @property
    def is_up(self) -> bool:
        return self._init is not None and self._init.poll() is None

    def pids(self) -> list[int]:
        """Return all processes of this host, sshd included, as this machine counts them."""
        if not self.is_up:
            return []
        own = _pid_namespace(self._init_pid)
        found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in found if pid != self._init_pid and _pid_namespace(pid) == own]

    def processes_with_environment(self, name: str, value: str | None = None) -> list[int]:
        """Return the processes of this host that were started with this variable (and value)."""
        wanted = os.fsencode(f"{name}=" if value is None else f"{name}={value}\0")
        found = []
        for pid in self.pids():
            with suppress(OSError):
                if b"\0" + wanted in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def listens_at(self, port: int) -> bool:
        """Tell whether some process of this host listens at this TCP port."""
        return any(
            local.endswith(f":{port:04X}") and state == "0A" for local, state in self._sockets()
        )

    def ip(self, *words: str) -> str:
        """Run ``ip`` upon this host's network."""
        return tool("ip", "-n", self.namespace, *words)

    def iptables(self, *words: str) -> str:
        """Run ``iptables`` upon this host's network."""
        return tool("ip", "netns", "exec", self.namespace, "iptables", "-w", "10", *words)

    @property
    def hosts_file(self) -> Path:
        """What is ``/etc/hosts`` on this host. Write into it; a new file would not be seen."""
        return namespaces.NAMES / self.namespace / "hosts"

    def boot(self) -> None:
        """Start the host, and its sshd if the lab has ssh."""
        boot_id = self.folder / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        self._init = subprocess.Popen(
            [
                *namespaces.within(self.namespace),
                *_UNSHARE,
                "sh",
                "-c",
                _INIT,
                "sh",
                self.name,
                boot_id,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._init.stdout is not None
        with self._init.stdout as told:
            said = told.readline()
        if said != "up\n":
            self.power_off()
            raise RuntimeError(f"{self.name} did not start: {said}")
        (first,) = psutil.Process(self._init.pid).children()
        self._init_pid = first.pid
        if self.ssh is not None:
            self.start_sshd()

    def power_off(self) -> None:
        """End the host as a power cut does: every process at once, nothing is told to anybody."""
        if self._init is not None:
            # With the first process the kernel ends all others, and it is the last to be gone.
            with suppress(ProcessLookupError):
                os.kill(self._init_pid or self._init.pid, signal.SIGKILL)
            self._init.wait()
        for process in self._started:
            process.kill()
            process.wait()
        self._init, self._init_pid, self._sshd = None, 0, None

    def start_sshd(self) -> None:
        assert self.ssh is not None
        quiet = subprocess.DEVNULL
        command = self.ssh.server(self.name, self.variables)
        self._sshd = self.popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
        await_true(f"{self.name} serves ssh", lambda: self.listens_at(SSH_PORT))

    def stop_sshd(self) -> None:
        """No new sessions; those that are open stay."""
        if self._sshd is not None:
            self._sshd.terminate()
            self._sshd.wait()
            self._sshd = None

    def remove(self) -> None:
        """End everything here and take the host's namespace away."""
        try:
            self.power_off()
        finally:
            namespaces.remove(self.namespace)
            for process in self._started:
                for stream in (process.stdin, process.stdout, process.stderr):
                    if stream is not None:
                        with suppress(BrokenPipeError):
                            stream.close()

    def _sockets(self) -> Iterator[tuple[str, str]]:
        for table in ("tcp", "tcp6"):
            with suppress(OSError):
                for line in Path(f"/proc/{self._init_pid}/net/{table}").read_text().splitlines():
                    fields = line.split()
                    yield fields[1], fields[3]

    def _write_names(self, entries: Mapping[str, str]) -> None:
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{address} {name}" for name, address in entries.items()]
        files = {
            "hosts": "".join(f"{line}\n" for line in lines),
            "hostname": f"{self.name}\n",
            "resolv.conf": "",
            "machine-id": f"{uuid.uuid4().hex}\n",
            # Some machines can always resolve their own name (nss-myhostname); not these.
            "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
        }
        folder = namespaces.NAMES / self.namespace
        folder.mkdir(parents=True)
        for name, text in files.items():
            if Path("/etc", name).exists():
                (folder / name).write_text(text)


def _pid_namespace(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return None
