"""What is to be run, and where: the words with which a job is described."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchmuster.errors import Impossible

Device = Literal["auto", "gpu", "cpu"]
Backend = Literal["muster", "c10d", "etcd-v2"]

USUAL_PORT = 29400
# What begins with a dash would be an option to ssh, or to a program that ssh hands it to.
_HOST = re.compile(r"(?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[0-9A-Fa-f:.]+(?:%\w[\w.-]*)?\])", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine as written in ``--hosts``: a name that ssh knows, and how many ranks it gets.

    An IPv6 address is written in brackets, and known to ssh without them.
    """

    name: str
    ranks: int | None = None

    def __str__(self) -> str:
        user, at, address = self.name.rpartition("@")
        name = f"{user}{at}[{address}]" if ":" in address else self.name
        return name if self.ranks is None else f"{name}:{self.ranks}"


@dataclass(frozen=True, kw_only=True)
class NodeCounts:
    """How many machines take part: at most so many, and with ``least`` of them it goes on."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to wait for what; every wait of a run is stated here, in seconds."""

    join_s: float = 120.0  # for all machines to answer the node registry
    reach_s: float = 5.0  # for one machine to reach another's port
    rendezvous_s: float = 120.0  # for the ranks' store to be there
    lost_after_s: float = 10.0  # without a sign of life, until a machine is taken for lost
    return_s: float = 5.0  # for a lost machine to come back, where the others can go on without it
    grace_s: float = 5.0  # between asking ranks to end and ending them
    end_hangs_s: float | None = (
        None  # until a hang ends the run; None: only one that cannot resolve
    )


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job: the command, what each machine gives to it, and what to do when it fails.

    ``ranks`` is for each machine; None means one for each device. ``typed`` are the words after ``muster``
    by which people know the job, up to the script if it is theirs.
    """

    name: str
    command: tuple[str, ...]
    typed: tuple[str, ...] = ("run",)
    module: bool = False
    folder: str
    device: Device = "auto"
    ranks: int | None = None
    gpu_ids: tuple[str, ...] | None = None
    share: bool = False
    wait_s: float = 0.0
    hosts: tuple[Host, ...] = ()
    port: int | None = None
    address: str | None = None
    backend: Backend = "muster"
    endpoint: str | None = None  # of the rendezvous service, for etcd
    max_restarts: int = 0  # in a row, without a newer checkpoint between them
    min_nodes: int | None = None  # so many machines are enough; None: all of them
    checkpoints: str | None = None  # where its ranks save and go on from; None: not known to do so
    environment: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


def as_people_know_it(typed: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return what was typed after ``muster``; a command that is ours is no part of it."""
    return list(typed) if is_ours(command) else [*typed, *command]


def is_ours(command: Sequence[str]) -> bool:
    """Say whether a command is a module of ours, which nobody typed."""
    return bool(command) and command[0].startswith("torchmuster.")


def parse_hosts(words: Sequence[str]) -> tuple[Host, ...]:
    """Read ``a,b:4,c``: names that ssh knows, each with its number of ranks if given.

    An IPv6 address stands in brackets: ``[fe80::1]:2``.
    """
    items = [item.strip() for word in words for item in word.split(",") if item.strip()]
    hosts = tuple(_host(item) for item in items)
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Impossible(
            f"host {twice[0]!r} is named twice",
            why="each machine takes part once, with as many ranks as you give it",
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
            f"{item!r} is not a host",
            why="a host is a name or an address that ssh knows, with : and its number of ranks",
            fix="--hosts a,b:4,user@10.0.0.3  # an IPv6 address stands in brackets: [fd00::1]:2",
        )
    plain = name.replace("[", "").replace("]", "")
    return Host(name=plain, ranks=int(count) if counted else None)


def parse_nodes(text: str) -> NodeCounts:
    """Read ``4``, or ``2:4`` for a run that goes on with as few as 2 machines."""
    least, colon, most = text.partition(":")
    most = most if colon else least
    if not _is_count(least) or not _is_count(most) or int(least) > int(most):
        raise Impossible(
            f"{text!r} is not a number of machines",
            why="it is a number, or the fewest and the most with : between them",
            fix="--nodes 4, or --nodes 2:4",
        )
    return NodeCounts(least=int(least), most=int(most))


def _is_count(text: str) -> bool:
    return text.isdecimal() and 1 <= int(text) <= 4096
