"""Records of what each host's ranks are doing, as files in the run folder, for monitoring.

``metrics/ranks/<host>/from-<first rank>.json`` is rewritten by the launcher, which receives the heartbeats anyway: every two
seconds, with many hosts less often. So monitoring never blocks the ranks and needs no connection to them. The exporter of a
host serves the files of its subfolder, and need not read those of other hosts; those of hosts that do not see the run folder
are in the launcher's.
"""

import contextlib
import time
from pathlib import Path
from urllib.parse import quote

import msgspec

from torchmuster import untrusted
from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.history.run_state import read_events
from torchmuster.runfolder import RunFolder, write_atomically

# A host without a record for this long no longer runs ranks of this run.
_GONE_AFTER_S = 30.0


class NodeRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one host at one moment."""

    host: str
    attempt: int
    at_unix_s: float
    ranks: tuple[Heartbeat, ...]


def write_node_ranks(
    run: RunFolder,
    *,
    host: str,
    exporter: str,
    attempt: int,
    heartbeats: tuple[Heartbeat, ...],
) -> None:
    """Record what a host's ranks are doing, for the exporter on this or another host; a full disk must not stop the run."""
    if not heartbeats or not run.marker.is_file():
        return
    content = NodeRanks(host=host, attempt=attempt, at_unix_s=time.time(), ranks=heartbeats)
    path = node_record_path(run, exporter, min(heartbeat.rank for heartbeat in heartbeats))
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(content).decode(), durable=False)


def node_record_path(run: RunFolder, machine: str, first_rank: int) -> Path:
    """Return the path of a host's record of the ranks starting with this one."""
    return run.metrics / "ranks" / quote(machine, safe="") / f"from-{first_rank}.json"


def read_node_ranks(
    run: RunFolder, now_unix_s: float, *, of_host: str | None = None
) -> list[NodeRanks]:
    """Return the hosts with recent rank records of the newest attempt; all, or one host."""
    if of_host is None:
        paths = run.metrics.glob("ranks/*/from-*.json")
    else:
        paths = node_record_path(run, of_host, 0).parent.glob("from-*.json")
    recent = []
    for path in sorted(paths):
        node = _read_ranks(path)
        if node is not None and now_unix_s - node.at_unix_s < _GONE_AFTER_S:
            recent.append(node)
    newest = max((node.attempt for node in recent), default=0)
    return [node for node in recent if node.attempt == newest]


def _read_ranks(path: Path) -> NodeRanks | None:
    try:
        return untrusted.read_typed(path, msgspec.json.Decoder(NodeRanks).decode)
    except (OSError, untrusted.Unreadable):
        return None


class HostLogs(msgspec.Struct, frozen=True, kw_only=True):
    """One host, its ranks, and the folder with their logs: a fact of the event "started"."""

    host: str
    first_rank: int
    ranks: int
    folder: str

    def path_of(self, rank: int) -> str:
        """Return where the log of a rank is on this host."""
        return f"{self.folder}/rank-{rank}.log"


def host_of(run: RunFolder, rank: int) -> HostLogs | None:
    """Return the host that has a rank's log; None if that is not recorded, or there is no such rank."""
    starts = [event for event in read_events(run) if event.name == "started"]
    hosts = starts[-1].fact("hosts", list[HostLogs]) if starts else None
    for host in hosts or ():
        if 0 <= rank - host.first_rank < host.ranks:
            return host
    return None
