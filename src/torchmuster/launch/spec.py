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
class Limits:
    """How long to wait for what; every wait of a run is stated here, in seconds."""

    join_s: float = 120.0  # for all machines to answer the roll-call
    reach_s: float = 5.0  # for one machine to reach another's port
    rendezvous_s: float = 120.0  # for the ranks' store to be there
    lost_after_s: float = 10.0  # without a sign of life, until a machine is taken for lost
    grace_s: float = 5.0  # between asking ranks to end and ending them


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job: the command, what each machine gives to it, and what to do when it fails.

    ``ranks`` is for each machine; None means one for each device.
    """

    name: str
    command: tuple[str, ...]
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
    max_restarts: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


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


def _is_count(text: str) -> bool:
    return text.isdecimal() and 1 <= int(text) <= 4096
