"""What a machine's ranks are doing, as a file in the run's folder: for whoever watches the run.

``metrics/ranks/<machine>/from-<first rank>.json`` is written anew every two seconds, by the machine itself where it sees the
run's folder, else by the launcher, which hears of its ranks anyway. So ranks are never held up by who watches them, and who
watches needs no way to the ranks. The folder is that of the machine that writes: what is written on one is served
by its exporter, which need not look at what all the others write.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec

from torchmuster.launch.hangs.heartbeat import Pulse
from torchmuster.runfolder import RunFolder, write_atomically

# A machine that has not written for so long does not run ranks of this run any more.
_GONE_AFTER_S = 30.0


class NodeRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one machine at one moment."""

    host: str
    attempt: int
    at_unix_s: float
    ranks: tuple[Pulse, ...]


def seen_here(path: str | None, run_id: str) -> RunFolder | None:
    """Return the run's folder if this machine sees it too: on the same disk, or on one that is shared."""
    if path is None:
        return None
    run = RunFolder(Path(path))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads(run.marker.read_text(encoding="utf-8"))["id"] == run_id:
            return run
    return None


def write(run: RunFolder, *, host: str, attempt: int, pulses: tuple[Pulse, ...]) -> None:
    """Write down what a machine's ranks are doing; a full disk must not end the run."""
    if not pulses or not run.marker.is_file():
        return
    content = NodeRanks(host=host, attempt=attempt, at_unix_s=time.time(), ranks=pulses)
    path = place(run, socket.gethostname(), min(pulse.rank for pulse in pulses))
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(content).decode(), durable=False)


def place(run: RunFolder, machine: str, first_rank: int) -> Path:
    """Return where a machine writes what ranks are doing, from this one on."""
    return run.metrics / "ranks" / quote(machine, safe="") / f"from-{first_rank}.json"


def read(run: RunFolder, now_unix_s: float, *, written_on: str | None = None) -> list[NodeRanks]:
    """Return the machines whose ranks were seen lately, of the newest attempt; all, or what one machine wrote."""
    found = [one for one in map(_read, _files(run, written_on)) if one is not None]
    lately = [one for one in found if now_unix_s - one.at_unix_s < _GONE_AFTER_S]
    newest = max((one.attempt for one in lately), default=0)
    return _each_rank_once([one for one in lately if one.attempt == newest])


def _each_rank_once(nodes: list[NodeRanks]) -> list[NodeRanks]:
    """Leave out what is told anew elsewhere: a machine that hears of a lower rank later writes to another file."""
    newest: dict[int, float] = {}
    for node in nodes:
        for pulse in node.ranks:
            newest[pulse.rank] = max(newest.get(pulse.rank, 0.0), node.at_unix_s)
    kept = [
        msgspec.structs.replace(
            node, ranks=tuple(one for one in node.ranks if newest[one.rank] == node.at_unix_s)
        )
        for node in nodes
    ]
    return [node for node in kept if node.ranks]


def _files(run: RunFolder, written_on: str | None) -> Iterable[Path]:
    if written_on is not None:
        return sorted(place(run, written_on, 0).parent.glob("from-*.json"))
    return sorted(run.metrics.glob("ranks/*/from-*.json"))


def _read(path: Path) -> NodeRanks | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeRanks)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
