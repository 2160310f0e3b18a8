"""What people see of a cell that runs on ranks: lines folded, values and errors once, where ranks stand."""

import time
from collections.abc import Callable, Collection, Mapping

from torchmuster.launch import node_ranks
from torchmuster.launch.console import Folder, rank_words
from torchmuster.launch.hangs.pulse import Pulse
from torchmuster.notebook.messages import Done
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds

_PROGRESS_AFTER_S = 3.0
# A pulse is a second or two old: what it says of a cell that has just begun is of the one before.
_PLACES_AFTER_S = 5.0
_GROUPS_SHOWN = 6


class Lines:
    """What the ranks print, line by line; equal lines of several ranks are one."""

    def __init__(
        self,
        run: RunFolder,
        world_size: int,
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = Folder(world_size, logs=str(run.logs))
        self._write = write
        self._clock = clock
        self._unfinished: dict[int, str] = {}

    def add(self, rank: int, text: str) -> None:
        """Take what a rank printed; what has no end of line yet waits for it."""
        whole, end, rest = (self._unfinished.get(rank, "") + text).rpartition("\n")
        self._unfinished[rank] = rest.rpartition("\r")[2] if rest.strip("\r") else ""
        if end:
            self._folder.add(rank, whole + end, self._clock())

    def unfinished(self, rank: int) -> str:
        """Return what a rank has begun to print: often a progress bar."""
        return self._unfinished.get(rank, "")

    def show_due(self) -> None:
        """Show what has waited long enough for its like."""
        self._show(self._folder.due(self._clock()))

    def show_all(self) -> None:
        """Show all that is left."""
        for rank, text in self._unfinished.items():
            if text:
                self._folder.add(rank, f"{text}\n", self._clock())
        self._unfinished.clear()
        self._show(self._folder.flush())

    def _show(self, lines: list[str]) -> None:
        if lines:
            self._write("\n".join([*lines, ""]))


class Progress:
    """A line that says, of a cell that takes longer, which ranks still run and where they stand."""

    def __init__(
        self,
        run: RunFolder,
        lines: Lines,
        show: Callable[[str], None],
        *,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._lines = lines
        self._show = show
        self._every_s = every_s
        self._clock = clock
        self._began_s = clock()
        self._next_s = self._began_s + _PROGRESS_AFTER_S
        self._shown = False

    def look(self, everybody: Collection[int], running: Collection[int]) -> None:
        """Show it anew if its time has come."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s, self._shown = now + self._every_s, True
        took_s = now - self._began_s
        places = pulses(self._run) if took_s >= _PLACES_AFTER_S else {}
        words = standing(everybody, running, places, self._lines.unfinished)
        self._show(f"{format_seconds(took_s)}: {words}")

    def end(self) -> None:
        """Put in its place how long it took."""
        if self._shown:
            self._show(f"took {format_seconds(self._clock() - self._began_s)}")


def pulses(run: RunFolder) -> dict[int, Pulse]:
    """Return what the ranks were doing a moment ago."""
    machines = node_ranks.read(run, time.time())
    return {pulse.rank: pulse for machine in machines for pulse in machine.ranks}


def standing(
    everybody: Collection[int],
    running: Collection[int],
    places: Mapping[int, Pulse],
    unfinished: Callable[[int], str] = lambda _: "",
) -> str:
    """Say where the ranks stand: ``rank 0 waits in all_reduce at cell-3:2; rank 1 has ended the cell``."""
    by_words: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(everybody):
        by_words.setdefault(_words(rank, running, places.get(rank), unfinished(rank)), []).append(
            rank
        )
    told = [
        f"{rank_words(ranks)} {one if len(ranks) == 1 else several}"
        for (one, several), ranks in by_words.items()
    ]
    more = f"; and {len(told) - _GROUPS_SHOWN} more" if len(told) > _GROUPS_SHOWN else ""
    return "; ".join(told[:_GROUPS_SHOWN]) + more


def _words(
    rank: int, running: Collection[int], pulse: Pulse | None, unfinished: str
) -> tuple[str, str]:
    """Say it of one rank, and of several."""
    if rank not in running:
        return "has ended the cell", "have ended the cell"
    if unfinished:
        return f"shows {unfinished}", f"show {unfinished}"
    if pulse is None or not pulse.place:
        return "runs", "run"
    if pulse.waiting:
        doing = pulse.waits[0].operation if pulse.waits else pulse.doing
        return f"waits in {doing} at {pulse.place}", f"wait in {doing} at {pulse.place}"
    doing = f"in {pulse.doing} " if pulse.doing else ""
    return f"is {doing}at {pulse.place}", f"are {doing}at {pulse.place}"


def values(done: Mapping[int, Done], world_size: int) -> str:
    """Return the values of the last expressions, those that are alike once."""
    return _folded({rank: one.value for rank, one in done.items()}, world_size)


def errors(done: Mapping[int, Done], world_size: int) -> str:
    """Return the tracebacks, those that are alike once."""
    return _folded({rank: one.error for rank, one in done.items()}, world_size)


def _folded(texts: Mapping[int, str], world_size: int) -> str:
    alike: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        if text:
            alike.setdefault(text, []).append(rank)
    return "\n".join(_with_ranks(text, ranks, world_size) for text, ranks in alike.items())


def _with_ranks(text: str, ranks: list[int], world_size: int) -> str:
    if world_size == 1:
        return text
    who = f"all {world_size} ranks" if len(ranks) == world_size else rank_words(ranks)
    return f"[{who}]\n{text}" if "\n" in text else f"[{who}] {text}"
