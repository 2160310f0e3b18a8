"""Write the logs of other hosts' ranks to the run folder on the launcher's host.

A thread writes them: the folder is often on a network disk, and a disk that blocks for some seconds
must not delay the launcher's heartbeats, or node agents would declare it lost. Pending text stays in
memory.
"""

import contextlib
import io
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

_KEPT_OPEN = 64
# At the end, give up on a disk that accepted nothing for this long.
_PATIENCE_S = 5.0


def mark_restart(folder: Path) -> None:
    """Write a separator line to every rank's log before the next attempt."""
    line = f"--- restarted, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n"
    for path in folder.glob("rank-*.log"):
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
            log.write(line)


class RankLogs:
    """Write the output of ranks on other hosts; call ``say`` once if that fails."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._texts: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._open: OrderedDict[int, io.FileIO] = OrderedDict()  # least recently used first
        self._thread: threading.Thread | None = None
        self._written = 0  # texts, including failed ones
        self._trouble = ""
        self._told = False

    def write(self, rank: int, text: str) -> None:
        """Queue text for a rank's log; return immediately."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_on, name="rank-logs", daemon=True)
            self._thread.start()
        self._texts.put((rank, text))
        self._tell()

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Write the queued text while the disk accepts something at least every ``patience_s``."""
        if self._thread is None:
            return
        self._texts.put(None)
        written = -1
        while self._thread.is_alive() and written != self._written:
            written = self._written
            self._thread.join(patience_s)
        if self._thread.is_alive():
            self._trouble = self._trouble or "the disk does not respond"
        self._tell()

    def _tell(self) -> None:
        # Not in the writing thread: only one thread may call ``say``.
        if self._trouble and not self._told:
            self._told = True
            self._say(f"cannot write the ranks' output to {self._folder}: {self._trouble}")

    def _write_on(self) -> None:
        while (item := self._texts.get()) is not None:
            rank, text = item
            try:
                self._append(rank, text.encode("utf-8", errors="replace"))
            except OSError as error:  # a full disk must not stop the run
                self._trouble = self._trouble or str(error)
                self._close(rank)
            self._written += 1
        for rank in list(self._open):
            self._close(rank)

    def _append(self, rank: int, data: bytes) -> None:
        if rank not in self._open:
            if len(self._open) >= _KEPT_OPEN:
                self._close(next(iter(self._open)))
            self._open[rank] = io.FileIO(self._folder / f"rank-{rank}.log", "a")
        self._open.move_to_end(rank)
        while data:
            data = data[self._open[rank].write(data) :]

    def _close(self, rank: int) -> None:
        with contextlib.suppress(KeyError, OSError):
            self._open.pop(rank).close()
