"""The commands of a notebook: ``%muster``, ``%%ranks`` and ``%%rank``."""

import atexit
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import from_error, render
from torchmuster.notebook import command_line, shown
from torchmuster.notebook.cell import CELL
from torchmuster.notebook.ranks import Ranks
from torchmuster.units import plural

_PROGRESS_S = 1.0
_PROGRESS_ON_A_TERMINAL_S = 10.0  # if a line cannot be replaced


class RanksError(Exception):
    """The error of a cell, shown without frames of this file."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class Notebook:
    """One kernel's ranks, and the commands that use them."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell  # of IPython
        self._ranks: Ranks | None = None

    # ---- commands

    def muster(self, line: str) -> None:
        """``%muster start|stop|restart``: the ranks of this notebook."""
        with _errors_as_text():
            action, flags = command_line.action_and_flags(line)
            match action:
                case "start":
                    self._start_first(flags)
                case "stop":
                    self.stop()
                case "restart":
                    self._restart()

    def all_ranks(self, line: str, code: str) -> None:
        """``%%ranks``: run the cell on every rank."""
        with _errors_as_text():
            if line.strip():
                raise Impossible(
                    "%%ranks runs a cell on every rank and takes no arguments",
                    fix=f"%%rank {line.strip()}  # for some ranks",
                )
            ranks = self._running()
            self._run(ranks, code, range(ranks.world_size))

    def some_ranks(self, line: str, code: str) -> None:
        """``%%rank 0`` or ``%%rank 0,2-3``: run the cell on these ranks only."""
        with _errors_as_text():
            ranks = self._running()
            self._run(ranks, code, command_line.chosen_ranks(line, ranks.world_size))

    def stop(self) -> None:
        """Stop the ranks, if there are any."""
        if self._ranks is not None:
            self._ranks.stop()

    def _start_first(self, flags: Sequence[str]) -> None:
        if self._ranks is not None and self._ranks.alive:
            raise Impossible(
                f"{plural(self._ranks.world_size, 'rank')} already running",
                why="a notebook has one group of ranks at a time",
                fix="%muster stop, then %muster start …; or %muster restart for the same "
                "configuration",
            )
        self.stop()
        self._start(flags)

    def _restart(self) -> None:
        if self._ranks is None:
            raise Impossible("no ranks started yet", fix="%muster start --ranks 2")
        self.stop()
        self._start(self._ranks.flags)

    # ---- how

    def _running(self) -> Ranks:
        if self._ranks is not None:
            self._ranks.catch_up()
        if self._ranks is None:
            why, fix = "none were started yet", "%muster start --ranks 2"
            raise Impossible("no ranks running", why=why, fix=fix)
        if not self._ranks.alive:
            raise Impossible("no ranks running", why="the ranks have exited", fix="%muster restart")
        return self._ranks

    def _start(self, flags: Sequence[str]) -> None:
        self._ranks = ranks = Ranks(flags)
        ranks.wait_until_ready(_write)
        print(f"{plural(ranks.world_size, 'rank')} ready; %%ranks runs a cell on them")

    def _run(self, ranks: Ranks, code: str, chosen: Collection[int]) -> None:
        every_s = _PROGRESS_ON_A_TERMINAL_S
        if self._is_kernel:
            every_s = _PROGRESS_S
        view = shown.CellShown(
            ranks.run_folder, ranks.world_size, chosen, _write, self._status(), every_s=every_s
        )
        # The number that the notebook shows; execution_count is already the next one's in some versions.
        name = f"{CELL}{len(self.shell.user_ns['In']) - 1}"
        try:
            result = ranks.run(code, name, chosen, view)
        finally:
            view.end()
        values = shown.values_text(result.done, ranks.world_size)
        if values:
            _write(f"{values}\n")
        errors = view.errors(result.done)
        if result.stuck:
            self._start_again(ranks, result.stuck, errors)
        if errors:
            raise RanksError(errors)
        if result.interrupted:  # after all ranks had finished
            raise RanksError("interrupted")

    def _start_again(self, ranks: Ranks, stuck: Sequence[int], errors: str) -> NoReturn:
        """Kill ranks that did not return before the second interrupt, and start new ones."""
        where = shown.progress_text(stuck, stuck, shown.read_heartbeats(ranks.run_folder))
        ranks.stop()
        self._start(ranks.flags)
        lines = [
            errors,
            f"interrupted, but not all ranks returned: {where}",
            "Ctrl-C does not interrupt a rank that waits in a collective, so all ranks were "
            "restarted and their variables are lost",
            "rerun the cells that define what you need, starting with init_process_group",
        ]
        raise RanksError("\n".join(line for line in lines if line))

    @property
    def _is_kernel(self) -> bool:
        return hasattr(self.shell, "kernel")

    def _status(self) -> Callable[[str], None]:
        """Return a function that replaces the text that it showed before."""
        from IPython.display import DisplayHandle

        handle = DisplayHandle()
        first = True

        def show(text: str) -> None:
            nonlocal first
            if not self._is_kernel:
                print(text, file=sys.stderr)
            elif first:
                handle.display({"text/plain": text}, raw=True)
            else:
                handle.update({"text/plain": text}, raw=True)
            first = False

        return show


_LOADED: list[Notebook] = []  # one per kernel


def load(shell: Any) -> None:
    """Add the magics to a kernel; its ranks stop when it exits."""
    if importlib.util.find_spec("IPython") is None:
        raise Impossible(
            "running cells on ranks requires IPython, which is not installed",
            fix="pip install 'torchmuster[notebook]'",
        )
    for earlier in _LOADED:  # %reload_ext
        earlier.stop()
    notebook = Notebook(shell)
    _LOADED[:] = [notebook]
    # The launcher also notices when the kernel exits; this stops the ranks before it does.
    atexit.register(notebook.stop)
    for kind, name, function in (
        ("line", "muster", notebook.muster),
        ("cell", "ranks", notebook.all_ranks),
        ("cell", "rank", notebook.some_ranks),
    ):
        shell.register_magic_function(function, kind, name)


@contextlib.contextmanager
def _errors_as_text() -> Iterator[None]:
    """Show an error as its text: what, why and fix."""
    try:
        yield
    except MusterError as error:
        raise RanksError(render(from_error(error))) from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
