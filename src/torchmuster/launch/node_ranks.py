"""What a machine's ranks are doing, as a file in the run's folder: for whoever watches the run.

Each machine writes its own, on its own disk or a shared one, and writes it anew every two seconds, so ranks are never held up by who watches
them, and who watches needs no way to the ranks.
"""

import contextlib
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchmuster.launch.hangs.pulse import Pulse
from torchmuster.runfolder import RunFolder, write_atomically

# A machine that has not written for so long does not run ranks of this run any more.
_GONE_AFTER_S = 30.0


class NodeRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one machine at one moment."""

    host: str
    attempt: int
    at_unix_s: float
    ranks: tuple[Pulse, ...]


def write(logs: Path, *, first_rank: int, attempt: int, pulses: tuple[Pulse, ...]) -> None:
    """Write down what this machine's ranks are doing; a full disk must not end the run."""
    content = NodeRanks(
        host=socket.gethostname(), attempt=attempt, at_unix_s=time.time(), ranks=pulses
    )
    folder = logs.parent / "metrics"
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        text = msgspec.json.encode(content).decode()
        write_atomically(folder / f"ranks-from-{first_rank}.json", text, durable=False)


def read(run: RunFolder, now_unix_s: float) -> list[NodeRanks]:
    """Return the machines whose ranks were seen lately, of the newest attempt."""
    found = [one for one in map(_read, _files(run)) if one is not None]
    lately = [one for one in found if now_unix_s - one.at_unix_s < _GONE_AFTER_S]
    newest = max((one.attempt for one in lately), default=0)
    return [one for one in lately if one.attempt == newest]


def _files(run: RunFolder) -> Iterable[Path]:
    return sorted(run.metrics.glob("ranks-from-*.json"))


def _read(path: Path) -> NodeRanks | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeRanks)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
