"""What a sink has got of a run, as a file in the run's folder: the next process goes on from there."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torchmuster.errors import Impossible, NotNow
from torchmuster.monitor.sinks.sink import Row, Table
from torchmuster.runfolder import RunFolder, write_atomically

# Who sends writes at least this often that it lives.
HEARD_EVERY_S = 5.0
_SILENT_AFTER_S = 30.0


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The last row of a table that was sent."""

    step: int = 0
    at_unix_s: float = 0.0


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """How far one sink is."""

    run: str = ""  # the tracker's own name of the run
    train: Mark = Mark()
    evaluation: Mark = Mark()
    trouble: str = ""  # why nothing can be sent now
    trouble_since_unix_s: float = 0.0
    at_unix_s: float = 0.0
    open: bool = False  # somebody sends

    def mark(self, table: Table) -> Mark:
        """Return how far a table is."""
        return self.train if table == "train" else self.evaluation

    def after(self, rows: list[Row]) -> "Sent":
        """Return how far it is when these were sent as well."""
        marks = {row.table: Mark(step=row.step, at_unix_s=row.at_unix_s) for row in rows}
        return msgspec.structs.replace(self, **marks)

    def before(self, step: int) -> "Sent":
        """Return how far it is when this step and all after it were taken back."""
        cut = {
            table: Mark(step=min(mark.step, step - 1), at_unix_s=mark.at_unix_s)
            for table, mark in (("train", self.train), ("evaluation", self.evaluation))
        }
        return msgspec.structs.replace(self, **cut)

    def failing_s(self, now_unix_s: float) -> float:
        """Return for how long nothing could be sent, or nobody sent; 0 where all is well."""
        if self.trouble:
            return max(0.0, now_unix_s - self.trouble_since_unix_s)
        silent_s = now_unix_s - self.at_unix_s
        return silent_s if self.open and silent_s > _SILENT_AFTER_S else 0.0


def _folder(run: RunFolder) -> Path:
    return run.metrics / "sinks"


def read_sent(run: RunFolder, sink: str) -> Sent | None:
    """Return how far a sink is; None where nothing was ever sent there."""
    try:
        return msgspec.json.decode((_folder(run) / f"{sink}.json").read_bytes(), type=Sent)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_all_sent(run: RunFolder) -> dict[str, Sent]:
    """Return how far each sink of a run is."""
    names = sorted(one.stem for one in _folder(run).glob("[!.]*.json"))
    return {name: sent for name in names if (sent := read_sent(run, name)) is not None}


def forget_sent(run: RunFolder, sink: str) -> None:
    """Begin anew: everything is to be sent again."""
    (_folder(run) / f"{sink}.json").unlink(missing_ok=True)


def write_sent(run: RunFolder, sink: str, sent: Sent) -> None:
    """Write down how far a sink is; on a full disk what was sent last may be sent again one day."""
    text = msgspec.json.encode(msgspec.structs.replace(sent, at_unix_s=time.time())).decode()
    with contextlib.suppress(OSError):
        _folder(run).mkdir(parents=True, exist_ok=True)
        write_atomically(_folder(run) / f"{sink}.json", text, durable=False)


@contextlib.contextmanager
def sent_lock(run: RunFolder, sink: str) -> Iterator[None]:
    """Be the only one who sends to a sink of a run; raises :class:`NotNow` where somebody else does."""
    folder = _folder(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / f".{sink}.lock").open("a")
    except OSError as error:
        raise Impossible(
            f"how far {sink} is cannot be written down",
            why=f"{folder}: {error.strerror}",
            fix="make room there, or use a folder that you may write to",
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NotNow(
                f"{run.id} is being sent to {sink} already",
                why="the process beside its rank 0 does it, or another muster runs export",
                fix="nothing needs to be done; muster watch tells if it cannot",
            ) from error
        yield
