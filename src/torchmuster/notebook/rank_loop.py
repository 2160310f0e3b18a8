"""The main loop of a notebook's rank: connect to the notebook, and run the received cells.

Cells run in the main thread, like a script, so that Ctrl-C interrupts them and the hang monitor
sees their position. The rank exits when the connection is closed.
"""

import contextlib
import io
import os
import signal
import sys
import types
from multiprocessing.connection import Client, Connection
from typing import Any

import msgspec

from torchmuster.notebook import cell
from torchmuster.notebook.messages import (
    SECRET_VARIABLE,
    Done,
    Hello,
    Outbox,
    Run,
    Wrote,
    receive,
    send,
)

_RUN = msgspec.msgpack.Decoder(Run)


class CellOutput(io.TextIOBase):
    """Standard output and error of cells. A forked child writes to the rank's log instead."""

    encoding = "utf-8"

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
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
            self._outbox.put(Wrote(text=text))
        elif sys.__stdout__ is not None:
            sys.__stdout__.write(text)
        return len(text)


class RankLoop:
    """One rank: its connection, and the names that cells have defined."""

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self._connection = connection
        self._outbox = Outbox(connection)
        self._busy = False
        # As Python does for a script, so that pickle and multiprocessing find the cells' names.
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self._space: dict[str, Any] = main.__dict__
        self._space["__builtins__"] = __builtins__
        self._space["rank"] = hello.rank
        self._space["world_size"] = hello.world_size

    def serve(self) -> None:
        """Process requests until the notebook disconnects."""
        sys.stdout = sys.stderr = CellOutput(self._outbox)
        while True:
            request = self.wait_for_a_cell()
            if request is None:
                break
            self._outbox.put(self._run(request))
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        self._outbox.close()

    def wait_for_a_cell(self) -> Run | None:
        """Wait for a request; hang reports show this function's name."""
        return receive(self._connection, _RUN)

    def _run(self, request: Run) -> Done:
        # Set for each cell: an earlier one may have changed it.
        signal.signal(signal.SIGINT, self._interrupted)
        self._busy = True
        try:
            done = cell.run_cell(request, self._space)
        except KeyboardInterrupt:  # after the cell had finished
            done = Done(request=request.request, error="KeyboardInterrupt", interrupted=True)
        finally:
            self._busy = False
        with contextlib.suppress(Exception):
            for stream in (sys.__stdout__, sys.__stderr__):
                if stream is not None:
                    stream.flush()
        return done

    def _interrupted(self, *_: object) -> None:
        if self._busy:  # otherwise the cell has already finished
            raise KeyboardInterrupt


def connect(address: str, secret: bytes, hello: Hello) -> Connection:
    """Connect to the notebook that started this rank; both prove that they have the key."""
    connection: Connection = Client(address, authkey=secret)
    send(connection, hello)
    return connection


def main(address: str) -> None:
    """Run as a rank; the environment has the key."""
    # Not inherited by child processes of cells.
    secret = bytes.fromhex(os.environ.pop(SECRET_VARIABLE))
    hello = Hello(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        pid=os.getpid(),
        run=os.environ["TORCHELASTIC_RUN_ID"].rpartition(".")[0],
    )
    with connect(address, secret, hello) as connection:
        RankLoop(connection, hello).serve()


if __name__ == "__main__":
    main(sys.argv[1])
