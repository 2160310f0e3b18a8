"""The output of a cell on ranks: merged lines, values and errors, and the ranks' positions."""

import time
from collections.abc import Callable, Collection, Mapping

from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.history import node_records
from torchmuster.launch.launcher.console import WINDOW_S, LineMerger
from torchmuster.notebook.messages import Done
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, rank_text

_PROGRESS_AFTER_S = 3.0
# Heartbeats are a second or two old: at first they still describe the previous cell.
_PLACES_AFTER_S = 5.0
# An error in a cell usually occurs on all ranks, and is then shown once.
_OTHERS_FOLLOW_WITHIN_S = 2.0
_GROUPS_SHOWN = 6
_INTERRUPTING = "interrupting; to stop waiting and lose all variables of the ranks: Ctrl-C again\n"


class Lines:
    """The ranks' output by line; equal lines of several ranks are merged."""

    def __init__(
        self,
        run: RunFolder,
        world_size: int,
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._merger = LineMerger(world_size, logs=str(run.logs))
        self._write = write
        self._clock = clock
        self._unfinished: dict[int, str] = {}
        self._due_s: float | None = None

    def add(self, rank: int, text: str) -> None:
        """Add printed text of a rank; incomplete lines wait for their end."""
        whole, end, rest = (self._unfinished.get(rank, "") + text).rpartition("\n")
        self._unfinished[rank] = rest.rpartition("\r")[2] if rest.strip("\r") else ""
        if end:
            self._merger.add(rank, whole + end)
            self._due_s = self._due_s or self._clock() + WINDOW_S

    def unfinished(self, rank: int) -> str:
        """Return a rank's incomplete line, often a progress bar."""
        return self._unfinished.get(rank, "")

    def show_due(self) -> None:
        """Show lines that have waited long enough for equal lines of other ranks."""
        if self._due_s is not None and self._clock() >= self._due_s:
            self._write_lines()

    def show_all(self) -> None:
        """Show all remaining lines."""
        for rank, text in self._unfinished.items():
            if text:
                self._merger.add(rank, f"{text}\n")
        self._unfinished.clear()
        self._write_lines()

    def _write_lines(self) -> None:
        lines = self._merger.take()
        self._due_s = None
        if lines:
            self._write("\n".join([*lines, ""]))


class CellShown:
    """The display of one running cell: lines, findings, and after a while the ranks' positions.

    ``write`` appends to the cell's output, ``set_status`` replaces the previous status text.
    """

    def __init__(
        self,
        run: RunFolder,
        world_size: int,
        ranks: Collection[int],
        write: Callable[[str], None],
        set_status: Callable[[str], None],
        *,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lines = Lines(run, world_size, write, clock)
        self._run = run
        self._world_size = world_size
        self._ranks = ranks
        self._write = write
        self._set_status = set_status
        self._every_s = every_s
        self._clock = clock
        self._began_s = clock()
        self._next_s = self._began_s + _PROGRESS_AFTER_S
        self._has_status = False
        self._failed_s: dict[int, float] = {}
        self._shown_errors: set[int] = set()
        self._done: Mapping[int, Done] = {}

    def wrote(self, rank: int, text: str) -> None:
        """Show printed text."""
        self._lines.add(rank, text)

    def interrupted(self) -> None:
        """Say that the ranks were interrupted, and what a second interrupt does."""
        self._write(_INTERRUPTING)

    def printed(self, text: str) -> None:
        """Show a line of the launcher: of a rank's log, or about a hang."""
        self._lines.show_due()
        self._write(text)

    def passing(self, done: Mapping[int, Done]) -> None:
        """Update the display, given the ranks that have finished."""
        self._done = done
        self._lines.show_due()
        now = self._clock()
        self._show_failures(now)
        if now >= self._next_s:
            self._next_s, self._has_status = now + self._every_s, True
            self._set_status(f"{format_seconds(now - self._began_s)}: {self._positions(now)}")

    def end(self) -> None:
        """Show all remaining output, and the duration."""
        self._lines.show_all()
        if self._has_status:
            self._set_status(f"took {format_seconds(self._clock() - self._began_s)}")

    def errors(self, done: Mapping[int, Done]) -> str:
        """Return the tracebacks that were not shown while the cell ran."""
        new = {rank: result for rank, result in done.items() if rank not in self._shown_errors}
        text = errors_text(new, self._world_size)
        if text or not self._shown_errors:
            return text
        return f"{rank_text(self._shown_errors)} failed, as shown above"

    def _show_failures(self, now: float) -> None:
        """Show the traceback of a rank before the others finish: they may wait for it forever."""
        for rank, result in self._done.items():
            if result.error and not result.interrupted:
                self._failed_s.setdefault(rank, now)
        late = {
            rank: self._done[rank]
            for rank, failed_s in self._failed_s.items()
            if rank not in self._shown_errors and now - failed_s >= _OTHERS_FOLLOW_WITHIN_S
        }
        if late:
            self._lines.show_all()
            self._write(f"{errors_text(late, self._world_size)}\n")
            self._shown_errors |= set(late)

    def _positions(self, now: float) -> str:
        heartbeats: dict[int, Heartbeat] = {}
        if now - self._began_s >= _PLACES_AFTER_S:
            heartbeats = read_heartbeats(self._run)
        running = [rank for rank in self._ranks if rank not in self._done]
        return progress_text(self._ranks, running, heartbeats, self._lines.unfinished)


def read_heartbeats(run: RunFolder) -> dict[int, Heartbeat]:
    """Return what the ranks were doing a moment ago."""
    heartbeats = {}
    for node in node_records.read_node_ranks(run, time.time()):
        for heartbeat in node.ranks:
            heartbeats[heartbeat.rank] = heartbeat
    return heartbeats


def progress_text(
    ranks: Collection[int],
    running: Collection[int],
    places: Mapping[int, Heartbeat],
    unfinished: Callable[[int], str] = lambda _: "",
) -> str:
    """Return the ranks' positions, such as ``rank 0: waiting in all_reduce at cell-3:2``."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        text = "finished"
        if rank in running:
            text = _position(places.get(rank), unfinished(rank))
        groups.setdefault(text, []).append(rank)
    parts = [f"{rank_text(group)}: {text}" for text, group in groups.items()]
    if len(parts) > _GROUPS_SHOWN:
        parts[_GROUPS_SHOWN:] = [f"and {len(parts) - _GROUPS_SHOWN} more"]
    return "; ".join(parts)


def _position(heartbeat: Heartbeat | None, unfinished: str) -> str:
    """Return where a running rank is: its progress bar, or what it does in which line."""
    if unfinished:
        return unfinished
    if heartbeat is None or not heartbeat.place:
        return "running"
    doing = heartbeat.doing
    if heartbeat.waiting and heartbeat.waits:
        doing = heartbeat.waits[0].operation
    waiting = "waiting " if heartbeat.waiting else ""
    where = f"in {doing} " if doing else ""
    return f"{waiting}{where}at {heartbeat.place}"


def values_text(done: Mapping[int, Done], world_size: int) -> str:
    """Return the values of the last expressions, merged if equal."""
    return _merged({rank: result.value for rank, result in done.items()}, world_size)


def errors_text(done: Mapping[int, Done], world_size: int) -> str:
    """Return the tracebacks, merged if equal."""
    return _merged({rank: result.error for rank, result in done.items()}, world_size)


def _merged(texts: Mapping[int, str], world_size: int) -> str:
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        if text:
            ranks_by_text.setdefault(text, []).append(rank)
    if world_size == 1:
        return "\n".join(ranks_by_text)
    parts = []
    for text, ranks in ranks_by_text.items():
        names = rank_text(ranks)
        if len(ranks) == world_size:
            names = f"all {world_size} ranks"
        separator = " "
        if "\n" in text:
            separator = "\n"
        parts.append(f"[{names}]{separator}{text}")
    return "\n".join(parts)
