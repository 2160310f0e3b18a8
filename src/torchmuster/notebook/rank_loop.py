"""The main loop of a notebook's rank: connect to the notebook, and run the received cells.

Cells run in the main thread, like a script, so that Ctrl-C interrupts them and the hang monitor
sees their position. The rank exits when the connection is closed.
"""

import contextlib
import io
import os
import signal
import socket
import sys
import time
import types
from typing import Any

import msgspec

from torchmuster.errors import Impossible, MusterError
from torchmuster.launch.transports.join import certificate
from torchmuster.notebook import cell, values
from torchmuster.notebook.connection import Connection
from torchmuster.notebook.messages import (
    SECRET_VARIABLE,
    Done,
    Fetch,
    Fetched,
    NotebookAddress,
    NotTheOther,
    Run,
    ToRank,
    Wrote,
    introduce_rank,
)

_COME_WITHIN_S = 60.0
_TRY_FOR_S = 5.0
_TRY_AGAIN_S = 0.2
_NAMES_SHOWN = 8


class _ToNotebook(io.TextIOBase):
    """Standard output and error of cells. A forked child writes to the rank's log instead."""

    encoding = "utf-8"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pid = os.getpid()

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor of the log, for child processes."""
        return 1

    def write(self, text: str) -> int:
        """Send the printed text."""
        if os.getpid() == self._pid:
            self._connection.send(Wrote(text=text))
        elif sys.__stdout__ is not None:
            sys.__stdout__.write(text)
        return len(text)


class RankLoop:
    """One rank: its connection, and the names that cells have defined."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection = connection
        self._busy = False
        # As Python does for a script, so that pickle and multiprocessing find the cells' names.
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self._space: dict[str, Any] = main.__dict__
        self._space["__builtins__"] = __builtins__
        self._space["rank"] = rank
        self._space["world_size"] = int(os.environ["WORLD_SIZE"])

    def serve(self) -> None:
        """Process requests until the notebook disconnects."""
        sys.stdout = sys.stderr = _ToNotebook(self._connection)
        while (asked := self.wait_for_a_cell()) is not None:
            match asked:
                case Run():
                    self._connection.send(self._run(asked))
                case Fetch():
                    self._connection.send(self._fetch(asked))
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__

    def wait_for_a_cell(self) -> ToRank | None:
        """Wait for a request; hang reports show this function's name."""
        return self._connection.receive(_ASKED)

    def _run(self, asked: Run) -> Done:
        # Set for each cell: an earlier one may have changed it.
        signal.signal(signal.SIGINT, self._interrupted)
        logged = _log_bytes()
        self._busy = True
        try:
            outcome = cell.run_cell(asked.code, asked.name, self._space)
        except KeyboardInterrupt:  # after the cell had finished
            outcome = cell.CellOutcome(error="KeyboardInterrupt", interrupted=True)
        finally:
            self._busy = False
        with contextlib.suppress(Exception):
            for stream in (sys.__stdout__, sys.__stderr__):
                if stream is not None:
                    stream.flush()
        return Done(
            request=asked.request,
            value=outcome.value,
            error=outcome.error,
            interrupted=outcome.interrupted,
            wrote_to_log=_log_bytes() != logged,
        )

    def _interrupted(self, *_: object) -> None:
        if self._busy:  # otherwise the cell has already finished
            raise KeyboardInterrupt

    def _fetch(self, asked: Fetch) -> Fetched:
        try:
            if asked.name not in self._space:
                raise Impossible(
                    f"there is no variable {asked.name!r}",
                    why=f"the cells of this rank have defined: {self._defined()}",
                    fix="define it in a cell that starts with %%ranks",
                )
            content = values.encode_value(asked.name, self._space[asked.name])
        except MusterError as error:
            return Fetched(request=asked.request, refusal=(error.what, error.why, error.fix))
        except Exception as error:  # such as out of memory on a GPU
            refusal = (f"cannot pull {asked.name}: {error!r}", "", "")
            return Fetched(request=asked.request, refusal=refusal)
        return Fetched(request=asked.request, content=content)

    def _defined(self) -> str:
        names = [
            name
            for name, value in self._space.items()
            if not name.startswith("_") and not isinstance(value, types.ModuleType)
        ]
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return ", ".join(names[-_NAMES_SHOWN:]) + more


_ASKED: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


def _log_bytes() -> int:
    """Return how much was written without Python: by libraries and child processes."""
    return os.fstat(1).st_size


def connect(meeting: NotebookAddress, secret: bytes, rank: int) -> Connection:
    """Connect to the notebook that started this rank, through the first reachable address."""
    deadline = time.monotonic() + _COME_WITHIN_S
    tried: dict[str, str] = {}
    while time.monotonic() < deadline:
        for address, port in meeting.addresses:
            try:
                return Connection(_open(address, port, meeting.fingerprint, secret, rank))
            except (OSError, NotTheOther) as error:
                tried[f"{address} port {port}"] = str(error)
        time.sleep(_TRY_AGAIN_S)
    raise Impossible(
        f"rank {rank} cannot connect to the notebook",
        why="; ".join(f"{place}: {error}" for place, error in tried.items()),
        fix="allow connections from this host to the notebook's host; muster check --hosts … "
        "shows what "
        "blocks them",
    )


def _open(address: str, port: int, fingerprint: str, secret: bytes, rank: int) -> socket.socket:
    end = socket.create_connection((address, port), _TRY_FOR_S)
    try:
        if fingerprint:
            end = certificate.client_context().wrap_socket(end)
            if not certificate.is_known(end.getpeercert(True), bytes.fromhex(fingerprint)):
                raise NotTheOther("its certificate does not match the notebook's")
        introduce_rank(end, secret, rank)
    except BaseException:
        end.close()
        raise
    return end


def main(words: list[str]) -> None:
    """Run as a rank; the argument has the notebook's addresses, the environment the key."""
    # Not inherited by child processes of cells.
    secret = bytes.fromhex(os.environ.pop(SECRET_VARIABLE))
    rank = int(os.environ["RANK"])
    connection = connect(msgspec.json.decode(words[0], type=NotebookAddress), secret, rank)
    try:
        RankLoop(connection, rank).serve()
    finally:
        connection.close()


if __name__ == "__main__":
    main(sys.argv[1:])
