"""The description of a job: what to run, where, and with which limits."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchmuster.errors import Impossible

Device = Literal["auto", "gpu", "cpu"]

USUAL_PORT = 29400
# How long ranks that are asked to stop may take; torch's elastic agent reads this variable too.
GRACE_VARIABLE, USUAL_GRACE_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"
# A name that begins with a dash would be an option to ssh, or to a program that ssh passes it to.
_HOST = re.compile(r"(?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[0-9A-Fa-f:.]+(?:%\w[\w.-]*)?\])", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host as given in ``--hosts``: a name that ssh knows, and its number of ranks.

    Users write an IPv6 address in brackets; ssh gets it without them.
    """

    name: str
    ranks: int | None = None

    def __str__(self) -> str:
        user, at, address = self.name.rpartition("@")
        name = f"{user}{at}[{address}]" if ":" in address else self.name
        return name if self.ranks is None else f"{name}:{self.ranks}"


@dataclass(frozen=True, kw_only=True)
class NodeCounts:
    """The number of hosts: at most ``most``; the run continues with at least ``least``."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """All timeouts of a run, in seconds."""

    join_s: float = 120.0  # for all hosts to join
    reach_s: float = 5.0  # for one host to reach another's port
    lost_after_s: float = 10.0  # without a heartbeat, until a host is declared lost
    return_s: float = 5.0  # for a lost host to rejoin, if the others can continue without it
    grace_s: float = 30.0  # between asking ranks to stop and killing them
    end_hangs_s: float | None = (
        None  # until a hang stops the run; None: only hangs that cannot resolve
    )
    time_s: float | None = None  # after which the run saves a checkpoint and stops


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job: the command, the resources on each host, and what to do when it fails.

    ``ranks`` is per host; None means one for each device. ``typed`` are the arguments after ``muster`` as
    the user typed them, up to the script if it is the user's own. ``flags`` are all flags before the script, to
    repeat the command.
    """

    name: str
    command: tuple[str, ...]
    typed: tuple[str, ...] = ("run",)
    flags: tuple[str, ...] = ()
    module: bool = False  # the first word is a module (python -m)
    program: bool = False  # the first word is a program that is no Python script
    folder: str
    device: Device = "auto"
    ranks: int | None = None
    gpu_ids: tuple[str, ...] | None = None
    share: bool = False
    wait_s: float = 0.0
    hosts: tuple[Host, ...] = ()
    port: int | None = None
    address: str | None = None
    max_restarts: int = 0  # in a row, without a newer checkpoint between them
    min_nodes: int | None = None  # the run continues with this many hosts; None: all are needed
    spares: int = 0  # the last hosts wait, and replace hosts that fail
    checkpoints: str | None = None  # where its ranks save and resume; None: not known to do so
    resume_with: tuple[str, ...] = ()  # arguments that a restart adds to the script's
    hosts_return: bool = False  # a host that its scheduler stops is replaced, and the run continues
    job_uid: str = ""  # of the scheduler's job, if it starts this command on every host
    environment: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


def as_people_know_it(
    typed: Sequence[str], command: Sequence[str], flags: Sequence[str] = ()
) -> list[str]:
    """Return the arguments typed after ``muster``, without a command of torchmuster itself."""
    return list(typed) if is_ours(command) else [*typed[:1], *(flags or typed[1:]), *command]


def is_ours(command: Sequence[str]) -> bool:
    """Return whether a command is a torchmuster module, which the user did not type."""
    return bool(command) and command[0].startswith("torchmuster.")


def parse_hosts(arguments: Sequence[str]) -> tuple[Host, ...]:
    """Parse ``a,b:4,c``: names that ssh knows, each with an optional number of ranks.

    An IPv6 address is in brackets: ``[fe80::1]:2``.
    """
    items = [item.strip() for argument in arguments for item in argument.split(",") if item.strip()]
    hosts = tuple(_host(item) for item in items)
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Impossible(
            f"host {twice[0]!r} is listed more than once",
            why="a host may be listed only once; its number of ranks follows a colon",
            fix=f"--hosts {twice[0]}:{names.count(twice[0])}",
        )
    return hosts


def _host(item: str) -> Host:
    name, count = item, "1"
    counted = not item.endswith("]") and ":" in item
    if counted:
        name, _, count = item.rpartition(":")
    if not _HOST.fullmatch(name) or not _is_count(count):
        raise Impossible(
            f"{item!r} is not a valid host",
            why="a host is a name or address that ssh knows, optionally with : and the number of ranks",
            fix="--hosts a,b:4,user@10.0.0.3  # IPv6 addresses in brackets: [fd00::1]:2",
        )
    plain = name.replace("[", "").replace("]", "")
    return Host(name=plain, ranks=int(count) if counted else None)


def parse_nodes(text: str) -> NodeCounts:
    """Parse ``4``, or ``2:4`` for a run that continues with as few as 2 hosts."""
    least, colon, most = text.partition(":")
    most = most if colon else least
    if not _is_count(least) or not _is_count(most) or int(least) > int(most):
        raise Impossible(
            f"{text!r} is not a valid number of hosts",
            why="expected a number N or a range MIN:MAX",
            fix="--nodes 4, or --nodes 2:4",
        )
    return NodeCounts(least=int(least), most=int(most))


def _is_count(text: str) -> bool:
    return text.isdecimal() and 1 <= int(text) <= 4096
