"""Which host has the logs of which ranks: ``logs/hosts.json`` in the run folder.

Each host writes its ranks' logs into the run folder as it sees it: with a shared file system, into the one folder.
"""

from collections.abc import Iterable

import msgspec

from torchmuster import untrusted
from torchmuster.runfolder import RunFolder, write_atomically


class HostLogs(msgspec.Struct, frozen=True, kw_only=True):
    """One host, its ranks, and the folder with their logs."""

    host: str
    first_rank: int
    ranks: int
    folder: str

    def path_of(self, rank: int) -> str:
        """Return where the log of a rank is on this host."""
        return f"{self.folder}/rank-{rank}.log"


_decode = msgspec.json.Decoder(list[HostLogs]).decode


def write_hosts(run: RunFolder, hosts: Iterable[HostLogs]) -> None:
    """Record which host has which logs."""
    write_atomically(run.logs / "hosts.json", msgspec.json.encode(list(hosts)).decode())


def host_of(run: RunFolder, rank: int) -> HostLogs | None:
    """Return the host that has a rank's log; None if that is not recorded, or there is no such rank."""
    try:
        hosts = untrusted.read_typed(run.logs / "hosts.json", _decode)
    except (OSError, untrusted.Unreadable):
        return None
    for host in hosts:
        if 0 <= rank - host.first_rank < host.ranks:
            return host
    return None
