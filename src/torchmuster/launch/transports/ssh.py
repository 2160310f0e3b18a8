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
from dataclasses import dataclass

from torchmuster.devices.processes import user_of_this_process
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch import protocol
from torchmuster.launch.job import Host, Limits
from torchmuster.launch.network import interfaces
from torchmuster.launch.transports.channel import Arrive, Transport, allow_open_files
from torchmuster.launch.transports.local import NODE_AGENT, PipeChannel

# sshd refuses more concurrent logins than this (MaxStartups).
AT_ONCE = 32
# One ssh process for each host: beyond this number, use a scheduler.
MOST_HOSTS = 256
_ALIVE_EVERY_S = 3
_FILES_EACH = 4
_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # never wait for a password prompt that the user cannot see
    *("-o", "ConnectTimeout=10"),
    *("-o", f"ServerAliveInterval={_ALIVE_EVERY_S}"),
    *("-o", "ClearAllForwardings=yes"),
    # Use an existing master connection, but do not leave a new one behind after the run.
    *("-o", "ControlMaster=no"),
)
_WORDS_SHOWN = 4


def node_agent_command(
    host: str, python: str, *, lost_after_s: float = Limits.lost_after_s
) -> list[str]:
    """Return the ssh command that starts a node agent on a host."""
    return ssh_command(host, (python, *NODE_AGENT), lost_after_s=lost_after_s)


def ssh_command(host: str, program: Sequence[str], *, lost_after_s: float) -> list[str]:
    """Return the ssh command that runs a fixed program on a host; user input is sent to its stdin.

    ssh closes a silent link shortly after the launcher has declared the host lost, not before.
    """
    remote = " ".join(shlex.quote(word) for word in program)
    # ssh exits after this many unanswered keep-alive messages.
    keep_alives = max(1, int(lost_after_s // _ALIVE_EVERY_S))
    patience = ("-o", f"ServerAliveCountMax={keep_alives}")
    return ["ssh", *_OPTIONS, *patience, "--", host, f"exec {remote}"]


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
    return interfaces.is_local(name, look_up=lambda _: ())


class SshTransport(Transport):
    """One place for each host, in the order given by the user."""

    def __init__(
        self,
        hosts: Sequence[Host],
        python: str,
        *,
        lost_after_s: float = Limits.lost_after_s,
    ) -> None:
        if len(hosts) > MOST_HOSTS:
            raise Impossible(
                f"{len(hosts)} hosts are too many for ssh",
                why=f"the launcher keeps one connection per host, at most {MOST_HOSTS}",
                fix="muster run --slurm …  # or Kubernetes: a scheduler has no such limit",
            )
        self._here = {place for place, host in enumerate(hosts) if is_this_host(host.name)}
        if len(self._here) < len(hosts):
            require_ssh()
        self._hosts = list(hosts)
        self._python = python
        self._lost_after_s = lost_after_s
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
            command = node_agent_command(name, self._python, lost_after_s=self._lost_after_s)
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
        self._arrive(place, _Greeted(channel, first))

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


class _Greeted:
    """A channel whose first message has already been read."""

    def __init__(self, channel: PipeChannel, first: protocol.FromAgent) -> None:
        self._channel = channel
        self._first: protocol.FromAgent | None = first
        self.send = channel.send
        self.why_closed = channel.why_closed
        self.close = channel.close

    async def receive(self) -> protocol.FromAgent | None:
        first, self._first = self._first, None
        return first if first is not None else await self._channel.receive()


@dataclass(frozen=True, kw_only=True)
class _Cause:
    """A pattern of ssh's error output, its cause and the fix."""

    name: str
    says: str
    why: str
    fix: str
    exit_code: int = ExitCode.FAILED


# The first match is used.
_CAUSES = (
    _Cause(
        name="ssh-host-key-changed",
        says=r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key .*has changed",
        why="its host key differs from the known one: it was reinstalled, or another machine answers "
        "at its address",
        fix="{forget}  # if it was reinstalled; then ssh {host} and compare the key",
        exit_code=ExitCode.IMPOSSIBLE,
    ),
    _Cause(
        name="ssh-host-key-unknown",
        says=r"Host key verification failed",
        why="its host key is not known here yet",
        fix="ssh {host}  # once by hand: compare the key and accept it",
        exit_code=ExitCode.IMPOSSIBLE,
    ),
    _Cause(
        name="ssh-key-refused",
        says=r"Permission denied",
        why="it does not accept your key",
        fix="ssh-copy-id {host}  # for a key with a passphrase also: ssh-add",
        exit_code=ExitCode.IMPOSSIBLE,
    ),
    _Cause(
        name="host-name-unknown",
        says=r"Could not resolve hostname|Name or service not known|Temporary failure in name",
        why="its name cannot be resolved on this host",
        fix="use its IP address, or add it to ~/.ssh/config (HostName) or /etc/hosts",
        exit_code=ExitCode.IMPOSSIBLE,
    ),
    _Cause(
        name="ssh-not-served",
        says=r"Connection refused",
        why="it is up, but no ssh server listens on that port",
        fix="on {host}: sudo systemctl enable --now ssh || sudo systemctl enable --now sshd  "
        "# or set Port in ~/.ssh/config",
    ),
    _Cause(
        name="host-unreachable",
        says=r"timed out|No route to host|Host is down",
        why="it does not answer: it is off, on another network, or a firewall blocks ssh",
        fix="ping {host}  # and check whether its firewall allows the ssh port",
    ),
    _Cause(
        name="network-unreachable",
        says=r"Network is unreachable",
        why="this host has no route to its network",
        fix="ip route get {host}  # shows the route",
    ),
    _Cause(
        name="ssh-hangs-up",
        says=r"kex_exchange_identification|Connection (closed|reset) by",
        why="it closed the connection before the login: too many concurrent logins, or this host is "
        "not allowed",
        fix="try again, and check MaxStartups and AllowUsers in its /etc/ssh/sshd_config",
    ),
    _Cause(
        name="torchmuster-missing",
        says=r"No module named '?torchmuster",
        why="torchmuster is not installed for {python} there",
        fix="ssh {host} {python} -m pip install torchmuster",
        exit_code=ExitCode.IMPOSSIBLE,
    ),
    _Cause(
        name="python-missing",
        says=r"No such file or directory|not found",
        why="{python} does not exist there",
        fix="install it there, or set the path on the remote hosts: --set launch.remote_python=PATH",
        exit_code=ExitCode.IMPOSSIBLE,
    ),
)


def diagnose_ssh(host: str, python: str, code: int, output: str) -> protocol.Trouble:
    """Return the cause and the fix for a failure of ssh."""
    cause = next(
        (candidate for candidate in _CAUSES if re.search(candidate.says, output, re.IGNORECASE)),
        _Cause(
            name="ssh-failed",
            says="",
            why="ssh exited with code {code}",
            fix="ssh {host}  # try it by hand",
        ),
    )
    # ssh's output names the file with the old key.
    forget = re.search(r"ssh-keygen -f .+", output)
    known = {
        "host": host,
        "code": code,
        "python": shlex.quote(python),
        "forget": forget[0].strip() if forget else f"ssh-keygen -R {host}",
    }
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return protocol.Trouble(
        name=cause.name,
        what=f"cannot connect to host {host}",
        why=cause.why.format(**known),
        fix=cause.fix.format(**known),
        evidence="\n".join(lines[-_WORDS_SHOWN:]),
        exit_code=cause.exit_code,
    )
