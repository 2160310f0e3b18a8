"""The transport over ssh: OpenSSH itself, so that the user's configuration, agent and jump hosts work.

The command on the other side is always the same: a node agent. The script, its arguments and everything
else travel through the pipe, so nothing a user gives is ever read by a remote shell.

This machine itself, if it is among the hosts, is not called: many have no ssh server, or do not accept
their own key.
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
from torchmuster.launch.transports.channel import Arrive, make_room_for
from torchmuster.launch.transports.local import NODE_AGENT, PipeChannel

# More logins at a time than this and sshd begins to refuse them (MaxStartups).
AT_ONCE = 32
# One ssh process for each machine: beyond this, starting them belongs to a scheduler.
MOST_HOSTS = 256
_ALIVE_EVERY_S = 3
_FILES_EACH = 4
_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # never wait for a password nobody sees being asked
    *("-o", "ConnectTimeout=10"),
    *("-o", f"ServerAliveInterval={_ALIVE_EVERY_S}"),
    *("-o", "ClearAllForwardings=yes"),
    # A connection that is open already is used; one that outlives the run is not left behind.
    *("-o", "ControlMaster=no"),
)


def node_agent_command(
    host: str, python: str, *, lost_after_s: float = Limits.lost_after_s
) -> list[str]:
    """Return the ssh command that starts a node agent on a machine.

    ssh gives up a silent link a little after the launcher has taken the machine for lost, not before.
    """
    remote = " ".join(shlex.quote(word) for word in (python, *NODE_AGENT))
    # It ends when it would ask once more than so many times.
    asked = max(1, int(lost_after_s // _ALIVE_EVERY_S))
    patience = ("-o", f"ServerAliveCountMax={asked}")
    return ["ssh", *_OPTIONS, *patience, "--", host, f"exec {remote}"]


def is_this_host(host: str) -> bool:
    """Say whether a host as written is this machine and this user; no name service is asked."""
    user, _, name = host.rpartition("@")
    if user and user != user_of_this_process():
        return False
    return interfaces.is_local(name, look_up=lambda _: ())


class SshTransport:
    """One place for each host, in the order they were written."""

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
                why=f"the launcher keeps a connection to each, and {MOST_HOSTS} is the most it will",
                fix="muster run --slurm …  # or Kubernetes: a scheduler starts any number",
            )
        self._here = {place for place, host in enumerate(hosts) if is_this_host(host.name)}
        if len(self._here) < len(hosts) and shutil.which("ssh") is None:
            raise Impossible(
                "there is no ssh on this machine",
                why="the other hosts are reached through OpenSSH",
                fix="apt-get install openssh-client  # or: muster host, which needs no ssh",
            )
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
        """The hosts' names as they were written."""
        return [host.name for host in self._hosts]

    async def open(self, arrive: Arrive) -> None:
        """Call every host, so many at a time."""
        make_room_for(_FILES_EACH * len(self._hosts), wanted=0)
        self._arrive = arrive
        for place in range(len(self._hosts)):
            await self.reopen(place)

    async def reopen(self, place: int) -> None:
        """Call a host."""
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
                command = [sys.executable, *NODE_AGENT]
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
            except asyncio.CancelledError:  # nobody waits for this host any more
                await channel.kill()
                raise
        if first is None:
            words, code = channel.why_closed(), channel.exit_code or 0
            self._failed.setdefault(place, diagnose_ssh(name, self._python, code, words))
            await channel.kill()
            return
        self._arrive(place, _Greeted(channel, first))

    def waiting_for(self, place: int) -> str:
        """Say how long ssh has been at it."""
        who = "its node agent is starting" if place in self._here else "ssh is connecting"
        return f"{who}, {time.monotonic() - self._called_s[place]:.0f} s"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return why ssh ended before a node agent spoke."""
        return self._failed.get(place)

    def rejoins(self, place: int) -> bool:
        """Nobody comes by itself."""
        return False

    async def close(self) -> None:
        """End the calls that nobody answered."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Greeted:
    """A channel whose first message has been read already."""

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
    """What ssh says when it fails (a pattern), what that means, and what to do."""

    name: str
    says: str
    why: str
    fix: str
    exit_code: int = ExitCode.FAILED


# The first that fits counts.
_CAUSES = (
    _Cause(
        name="ssh-host-key-changed",
        says=r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key .*has changed",
        why="it shows another host key than the one that is known here: it was installed anew, or "
        "somebody else answers in its place",
        fix="{forget}  # once you know which; then ssh {host}, and compare the key it shows",
        exit_code=ExitCode.IMPOSSIBLE,
    ),
    _Cause(
        name="ssh-host-key-unknown",
        says=r"Host key verification failed",
        why="its host key is not known here yet",
        fix="ssh {host}  # once by hand: compare the key it shows, and accept it",
        exit_code=ExitCode.IMPOSSIBLE,
    ),
    _Cause(
        name="ssh-key-refused",
        says=r"Permission denied",
        why="it does not accept your key",
        fix="ssh-copy-id {host}  # and for a key with a passphrase: ssh-add",
        exit_code=ExitCode.IMPOSSIBLE,
    ),
    _Cause(
        name="host-name-unknown",
        says=r"Could not resolve hostname|Name or service not known|Temporary failure in name",
        why="its name cannot be resolved on this machine",
        fix="give its address, or add it to ~/.ssh/config (HostName) or /etc/hosts",
        exit_code=ExitCode.IMPOSSIBLE,
    ),
    _Cause(
        name="ssh-not-served",
        says=r"Connection refused",
        why="it is there, but no ssh server listens on that port",
        fix="on {host}: sudo systemctl enable --now ssh || sudo systemctl enable --now sshd  "
        "# or Port in ~/.ssh/config",
    ),
    _Cause(
        name="host-unreachable",
        says=r"timed out|No route to host|Host is down",
        why="it does not answer: it is off, on another network, or a firewall keeps ssh out",
        fix="ping {host}  # and check the firewall there for the port of ssh",
    ),
    _Cause(
        name="network-unreachable",
        says=r"Network is unreachable",
        why="this machine has no way to its network",
        fix="ip route get {host}  # shows where packets for it go",
    ),
    _Cause(
        name="ssh-hangs-up",
        says=r"kex_exchange_identification|Connection (closed|reset) by",
        why="it hung up before the login: it has too many logins at once, or does not let this "
        "machine in",
        fix="try again, and look at MaxStartups and AllowUsers in its /etc/ssh/sshd_config",
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
        why="there is no {python} there",
        fix="install it there, or give the path on the other machines: --remote-python PATH",
        exit_code=ExitCode.IMPOSSIBLE,
    ),
)
_WORDS_SHOWN = 4


def diagnose_ssh(host: str, python: str, code: int, words: str) -> protocol.Trouble:
    """Say what ssh's failure means."""
    cause = next(
        (one for one in _CAUSES if re.search(one.says, words, re.IGNORECASE)),
        _Cause(
            name="ssh-failed",
            says="",
            why="ssh ended with code {code}",
            fix="ssh {host}  # try it by hand",
        ),
    )
    # ssh itself knows in which file the old key is.
    forget = re.search(r"ssh-keygen -f .+", words)
    known = {
        "host": host,
        "code": code,
        "python": shlex.quote(python),
        "forget": forget[0].strip() if forget else f"ssh-keygen -R {host}",
    }
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return protocol.Trouble(
        name=cause.name,
        what=f"host {host} cannot take part",
        why=cause.why.format(**known),
        fix=cause.fix.format(**known),
        evidence="\n".join(lines[-_WORDS_SHOWN:]),
        exit_code=cause.exit_code,
    )
