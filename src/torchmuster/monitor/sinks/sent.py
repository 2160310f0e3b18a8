"""The progress of a sink, stored in the run folder, so that the next process can resume."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torchmuster import untrusted
from torchmuster.errors import Impossible, NotNow
from torchmuster.monitor.sinks.sink import Row, Table
from torchmuster.runfolder import RunFolder, write_atomically

# The sender updates its heartbeat at least this often.
HEARD_EVERY_S = 5.0
_SILENT_AFTER_S = 30.0


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The last row of a table that was sent."""

    step: int = 0
    at_unix_s: float = 0.0


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of one sink."""

    run: str = ""  # the tracker's id of the run
    train: Mark = Mark()
    evaluation: Mark = Mark()
    trouble: str = ""  # current error
    trouble_since_unix_s: float = 0.0
    at_unix_s: float = 0.0
    open: bool = False  # a process is sending

    def mark(self, table: Table) -> Mark:
        """Return the progress of a table."""
        return self.train if table == "train" else self.evaluation

    def after(self, rows: list[Row]) -> "Sent":
        """Return the progress after these rows were sent."""
        marks = {row.table: Mark(step=row.step, at_unix_s=row.at_unix_s) for row in rows}
        return msgspec.structs.replace(self, **marks)

    def before(self, step: int) -> "Sent":
        """Return the progress after this step and all later ones were withdrawn."""
        cut = {
            table: Mark(step=min(mark.step, step - 1), at_unix_s=mark.at_unix_s)
            for table, mark in (("train", self.train), ("evaluation", self.evaluation))
        }
        return msgspec.structs.replace(self, **cut)

    def failing_s(self, now_unix_s: float) -> float:
        """Return how long sending has failed or no process has been sending; 0 if all is well."""
        if self.trouble:
            return max(0.0, now_unix_s - self.trouble_since_unix_s)
        silent_s = now_unix_s - self.at_unix_s
        return silent_s if self.open and silent_s > _SILENT_AFTER_S else 0.0


_decode_sent = msgspec.json.Decoder(Sent).decode


def _folder(run: RunFolder) -> Path:
    return run.metrics / "sinks"


def read_sent(run: RunFolder, sink: str) -> Sent | None:
    """Return the progress of a sink; None if nothing was ever sent there."""
    try:
        return untrusted.read_typed(_folder(run) / f"{sink}.json", _decode_sent)
    except (OSError, untrusted.Unreadable):
        return None


def read_all_sent(run: RunFolder) -> dict[str, Sent]:
    """Return the progress of each sink of a run."""
    names = sorted(one.stem for one in _folder(run).glob("[!.]*.json"))
    return {name: sent for name in names if (sent := read_sent(run, name)) is not None}


def write_sent(run: RunFolder, sink: str, sent: Sent) -> None:
    """Store the progress of a sink; on a full disk, the last rows may be sent twice."""
    text = msgspec.json.encode(msgspec.structs.replace(sent, at_unix_s=time.time())).decode()
    with contextlib.suppress(OSError):
        _folder(run).mkdir(parents=True, exist_ok=True)
        write_atomically(_folder(run) / f"{sink}.json", text, durable=False)


@contextlib.contextmanager
def sent_lock(run: RunFolder, sink: str) -> Iterator[None]:
    """Lock a sink of a run for sending; raise :class:`NotNow` if another process holds the lock."""
    folder = _folder(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / f".{sink}.lock").open("a")
    except OSError as error:
        raise Impossible(
            f"cannot store the progress of {sink}",
            why=f"{folder}: {error.strerror}",
            fix="free disk space, or use a writable folder",
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NotNow(
                f"another process is already sending {run.id} to {sink}",
                why="it is the sidecar process of rank 0",
                fix="nothing to do; muster watch shows an alert if sending fails",
            ) from error
        yield
