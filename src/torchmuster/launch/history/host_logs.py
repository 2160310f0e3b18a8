"""Logs that stay on the hosts of a run: which host has which, and requests for them.

``logs/hosts.json`` lists the hosts. A request is an empty file ``logs/requests/rank-<n>``; the launcher gets the end of that
log, writes it to ``logs/fetched/rank-<n>.log``, and deletes the request. So ``muster logs --rank`` needs no connection to the
launcher.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchmuster import untrusted
from torchmuster.runfolder import RunFolder, write_atomically

LOGS_STAY_ABOVE = 64  # hosts
MOST_BYTES = 256 * 1024  # as text in a message, control characters take up to six bytes
_REQUEST = re.compile(r"rank-(\d{1,9})")


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
    """Return the host that has a rank's log; None if logs do not stay on hosts, or there is no such rank."""
    try:
        hosts = untrusted.read_typed(run.logs / "hosts.json", _decode)
    except (OSError, untrusted.Unreadable):
        return None
    return next((one for one in hosts if 0 <= rank - one.first_rank < one.ranks), None)


def request_log(run: RunFolder, rank: int) -> Path:
    """Ask the launcher for a rank's log; return the file that disappears once it has been fetched."""
    path = run.logs / "requests" / f"rank-{rank}"
    path.parent.mkdir(exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))
    return path


def fetched_path(run: RunFolder, rank: int) -> Path:
    """Return where the launcher writes the end of a rank's log."""
    return run.logs / "fetched" / f"rank-{rank}.log"


def requested_ranks(run: RunFolder) -> list[int]:
    """Return the ranks whose logs were requested."""
    try:
        names = [path.name for path in (run.logs / "requests").iterdir()]
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _REQUEST.fullmatch(name)))


def write_fetched(run: RunFolder, rank: int, text: str) -> None:
    """Answer a request; a full disk must not stop the run."""
    with contextlib.suppress(OSError):
        path = fetched_path(run, rank)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, text, durable=False)
    with contextlib.suppress(OSError):
        (run.logs / "requests" / f"rank-{rank}").unlink()
