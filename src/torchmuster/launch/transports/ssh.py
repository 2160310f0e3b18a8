"""The ssh transport. It runs OpenSSH, so that the user's configuration, agent and jump hosts work.

The remote command is always the same: a node agent. The script, its arguments and everything else are
sent through the pipe, so a remote shell never parses user input.

The local host, if it is among the hosts, is not reached through ssh: many hosts have no ssh server, or do
not accept their own key.
"""

import asyncio
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence

from torchmuster.devices.processes import user_of_this_process
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch import protocol
from torchmuster.launch.job import Host
from torchmuster.launch.network import interfaces
from torchmuster.launch.transports.channel import Arrive, Transport, allow_open_files
from torchmuster.launch.transports.local import NODE_AGENT, PipeChannel

# sshd refuses more concurrent logins than this (MaxStartups).
AT_ONCE = 32
_FILES_EACH = 4
_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # never wait for a password prompt that the user cannot see
    *("-o", "ConnectTimeout=10"),
    *("-o", "ClearAllForwardings=yes"),
    # Use an existing master connection, but do not leave a new one behind after the run.
    *("-o", "ControlMaster=no"),
)
_WORDS_SHOWN = 4


def ssh_command(host: str, program: Sequence[str]) -> list[str]:
    """Return the ssh command that runs a fixed program on a host; user input is sent to its stdin."""
    remote = " ".join(shlex.quote(word) for word in program)
    return ["ssh", *_OPTIONS, "--", host, f"exec {remote}"]


def require_ssh() -> None:
    """Raise an error if OpenSSH is not installed."""
    if shutil.which("ssh") is None:
        raise Impossible(
            "ssh is not installed on this host",
            why="Muster connects to the other hosts with OpenSSH",
            fix="apt-get install openssh-client  # or: muster run --join, which needs no ssh",
        )


def is_this_host(host: str) -> bool:
    """Return whether a host name means this host and this user, without a name lookup."""
    user, _, name = host.rpartition("@")
    if user and user != user_of_this_process():
        return False
    return interfaces.is_local(name, resolve=lambda _: ())


class SshTransport(Transport):
    """One place for each host, in the order given by the user."""

    def __init__(self, hosts: Sequence[Host], python: str) -> None:
        self._here = {place for place, host in enumerate(hosts) if is_this_host(host.name)}
        if len(self._here) < len(hosts):
            require_ssh()
        self._hosts = list(hosts)
        self._python = python
        self._arrive: Arrive | None = None
        self._called_s: dict[int, float] = {}
        self._failed: dict[int, protocol.Trouble] = {}
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def places(self) -> Sequence[str]:
        """The host names as given by the user."""
        return [host.name for host in self._hosts]

    async def open(self, arrive: Arrive) -> None:
        """Connect to every host, at most ``AT_ONCE`` at a time."""
        allow_open_files(_FILES_EACH * len(self._hosts))
        self._arrive = arrive
        for place in range(len(self._hosts)):
            await self.reopen(place)

    async def reopen(self, place: int) -> None:
        """Connect to a host."""
        self._failed.pop(place, None)
        self._called_s[place] = time.monotonic()
        task = asyncio.create_task(self._call(place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, place: int) -> None:
        assert self._arrive is not None
        async with self._gate:
            name = self._hosts[place].name
            command = ssh_command(name, (self._python, *NODE_AGENT))
            if place in self._here:
                command = [sys.executable, *NODE_AGENT, "--local"]
            try:
                channel = await PipeChannel.open(command)
            except OSError as error:  # too many processes or open files
                self._failed[place] = diagnose_ssh(name, self._python, 1, f"ssh: {error}")
                return
            try:
                first = await channel.receive()
            except protocol.UnreadableMessage as error:
                first = None
                self._failed[place] = diagnose_ssh(name, self._python, 1, str(error))
            except asyncio.CancelledError:  # the host is no longer needed
                await channel.kill()
                raise
        if first is None:
            output, code = channel.why_closed(), channel.exit_code or 0
            self._failed.setdefault(place, diagnose_ssh(name, self._python, code, output))
            await channel.kill()
            return
        channel.first = first
        self._arrive(place, channel)

    def waiting_for(self, place: int) -> str:
        """Return how long ssh has been connecting."""
        who = "its node agent is starting" if place in self._here else "ssh is connecting"
        return f"{who}, {time.monotonic() - self._called_s[place]:.0f} s"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return why ssh exited before the node agent sent a message."""
        return self._failed.get(place)

    async def close(self) -> None:
        """Cancel the connections that are not established yet."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# Patterns of ssh's error output, each with its finding, its cause and the fix. The first match is used.
_CAUSES = (
    (
        "ssh-host-key-unknown",
        r"Host key verification failed|IDENTIFICATION HAS CHANGED",
        "its host key is not the one that is known here",
        "ssh {host}  # once by hand: compare the key and accept it; ssh says how to remove an old one",
    ),
    (
        "ssh-key-refused",
        r"Permission denied",
        "it does not accept your key",
        "ssh-copy-id {host}  # for a key with a passphrase also: ssh-add",
    ),
    (
        "host-name-unknown",
        r"Could not resolve hostname|Name or service not known|Temporary failure in name",
        "its name cannot be resolved on this host",
        "use its IP address, or add it to ~/.ssh/config (HostName) or /etc/hosts",
    ),
    (
        "ssh-not-served",
        r"Connection refused",
        "it is up, but no ssh server listens on that port",
        "on {host}: sudo systemctl enable --now ssh || sudo systemctl enable --now sshd  "
        "# or set Port in ~/.ssh/config",
    ),
    (
        "host-unreachable",
        r"timed out|No route to host|Host is down|Network is unreachable",
        "it does not answer: it is off, on another network, or a firewall blocks ssh",
        "ping {host}  # and check whether its firewall allows the ssh port",
    ),
    (
        "torchmuster-missing",
        r"No module named '?torchmuster",
        "torchmuster is not installed for {python} there",
        "ssh {host} {python} -m pip install torchmuster",
    ),
    (
        "python-missing",
        r"No such file or directory|not found",
        "{python} does not exist there",
        "install it there, or set the path on the remote hosts: --set launch.remote_python=PATH",
    ),
    ("ssh-failed", r"", "ssh exited with code {code}", "ssh {host}  # try it by hand"),
)
# Another try may succeed.
_MAY_PASS = {"ssh-not-served", "host-unreachable", "ssh-failed"}


def diagnose_ssh(host: str, python: str, code: int, output: str) -> protocol.Trouble:
    """Return the cause and the fix for a failure of ssh."""
    for name, pattern, why, fix in _CAUSES:  # noqa: B007
        if re.search(pattern, output, re.IGNORECASE):
            break
    values = {"host": host, "code": code, "python": shlex.quote(python)}
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return protocol.Trouble(
        name=name,
        what=f"cannot connect to host {host}",
        why=why.format(**values),
        fix=fix.format(**values),
        evidence="\n".join(lines[-_WORDS_SHOWN:]),
        exit_code=ExitCode.FAILED if name in _MAY_PASS else ExitCode.IMPOSSIBLE,
    )
