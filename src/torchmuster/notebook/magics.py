"""The commands of a notebook: ``%muster``, ``%%ranks`` and ``%%rank``."""

import argparse
import atexit
import contextlib
import importlib.util
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, render
from torchmuster.launch.console import rank_words
from torchmuster.launch.spec import JobSpec, Limits, parse_hosts
from torchmuster.notebook import shown
from torchmuster.notebook.cell import CELL
from torchmuster.notebook.ranks import Asked, Listener, Ranks, Result

_GRACE_S = 2.0
_JOIN_WITHIN_S = 1800.0  # people walk from one machine to the next
_PROGRESS_S = 1.0
_PROGRESS_ON_A_TERMINAL_S = 10.0  # where a line cannot be replaced


class Shell(Protocol):
    """What is used of IPython."""

    user_ns: dict[str, Any]
    execution_count: int

    def register_magic_function(self, function: Callable[..., None], kind: str, name: str) -> None:
        """Add a command."""


class RanksError(Exception):
    """What a cell ends with: told as it is, without the way through this file."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RanksError(f"{message}\n{self.format_usage().rstrip()}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise RanksError("")


class Notebook:
    """One kernel's ranks, and the commands that use them."""

    def __init__(self, shell: "Shell") -> None:
        self.shell = shell
        self._ranks: Ranks | None = None
        self._parser = _parser()

    # ---- commands

    def muster(self, line: str) -> None:
        """``%muster start|stop|restart|status|pull``: the ranks of this notebook."""
        with _told():
            options = self._parser.parse_args(shlex.split(line))
            options.run(self, options)

    def all_ranks(self, line: str, code: str) -> None:
        """``%%ranks``: run the cell on every rank."""
        with _told():
            if line.strip():
                raise Impossible(
                    "%%ranks runs a cell on every rank, and takes no words",
                    fix=f"%%rank {line.strip()}  # for some of them",
                )
            ranks = self._running()
            self._run(ranks, code, range(ranks.world_size))

    def some_ranks(self, line: str, code: str) -> None:
        """``%%rank 0`` or ``%%rank 0,2-3``: run the cell on these ranks alone."""
        with _told():
            ranks = self._running()
            self._run(ranks, code, _chosen(line, ranks.world_size))

    def start(self, options: argparse.Namespace) -> None:
        """Start ranks."""
        if self._ranks is not None and self._ranks.alive:
            raise Impossible(
                f"{self._ranks.world_size} ranks run already",
                why="a notebook has one group of ranks at a time",
                fix="%muster stop, then %muster start …; or %muster restart for the same ones anew",
            )
        self._start(_asked(options))

    def restart(self, _: argparse.Namespace) -> None:
        """End the ranks and start the same ones anew."""
        if self._ranks is None:
            raise Impossible("no ranks were started yet", fix="%muster start --ranks 2")
        asked = self._ranks.asked
        self.stop()
        self._start(asked)

    def stop(self, _: argparse.Namespace | None = None) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.stop()

    def status(self, _: argparse.Namespace) -> None:
        """Say what runs."""
        ranks = self._ranks
        if ranks is None or not ranks.alive:
            print("no ranks run; %muster start --ranks 2")
            return
        print(f"{_count(ranks.world_size)}; logs in {ranks.run_folder.logs}")
        if ranks.refused:
            print(f"connections without the key, refused: {'; '.join(ranks.refused)}")

    def pull(self, options: argparse.Namespace) -> None:
        """Bring a variable of the ranks into the notebook."""
        ranks = self._running()
        chosen = range(ranks.world_size) if options.rank is None else [options.rank]
        if options.rank is not None and options.rank not in range(ranks.world_size):
            raise _no_such_rank(options.rank, ranks.world_size)
        found = ranks.fetch(options.name, chosen)
        by_rank = [found[rank] for rank in chosen]
        self.shell.user_ns[options.name] = by_rank if options.rank is None else by_rank[0]

    # ---- how

    def _running(self) -> Ranks:
        if self._ranks is None or not self._ranks.alive:
            raise Impossible(
                "no ranks run",
                why="they were ended" if self._ranks is not None else "none were started yet",
                fix="%muster restart" if self._ranks is not None else "%muster start --ranks 2",
            )
        return self._ranks

    def _start(self, asked: Asked) -> None:
        self._ranks = ranks = Ranks(asked)
        place = self._place()
        said: list[str] = []
        codes: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            place("\n".join([*codes, said[-1]]))

        def show_code(machine: int, line: str) -> None:
            where = f"on machine {machine}, in a folder with the same code, paste:\n  {line}"
            codes.append(where)
            place("\n".join(codes))

        ranks.wait_until_here(say, show_code)
        # In place of the codes, which are not to be kept in the notebook.
        reasons = [text for text in said if not text.startswith(("run ", "waiting"))]
        place(
            "\n".join([*reasons, f"{_count(ranks.world_size)} here; %%ranks runs a cell on them"])
        )

    def _run(self, ranks: Ranks, code: str, chosen: Collection[int]) -> None:
        lines = shown.Lines(ranks.run_folder, ranks.world_size, _write)
        every_s = _PROGRESS_S if self._is_kernel else _PROGRESS_ON_A_TERMINAL_S
        progress = shown.Progress(ranks.run_folder, lines, self._place(), every_s=every_s)

        def passing(running: Collection[int]) -> None:
            lines.show_due()
            progress.look(chosen, running)

        def found(findings: Sequence[Finding], running: Collection[int]) -> None:
            lines.show_due()
            _write(f"{render(findings)}\n")
            if ended := [rank for rank in chosen if rank not in running]:
                _write(f"{shown.standing(ended, running, {})}, and come no more\n")

        listener = Listener(wrote=lines.add, found=found, passing=passing)
        name = f"{CELL}{self.shell.execution_count}"
        try:
            result = ranks.run(code, name, chosen, listener)
        finally:
            lines.show_all()
            progress.end()
        self._tell(ranks, result)

    def _tell(self, ranks: Ranks, result: Result) -> None:
        if text := shown.values(result.done, ranks.world_size):
            _write(f"{text}\n")
        errors = shown.errors(result.done, ranks.world_size)
        if result.stuck:
            self._start_again(ranks, result.stuck, errors)
        if errors:
            raise RanksError(errors)
        if result.interrupted:  # just when all had ended
            raise RanksError("interrupted")

    def _start_again(self, ranks: Ranks, stuck: Sequence[int], errors: str) -> NoReturn:
        """End ranks that did not hear the interrupt, for they never will, and start new ones."""
        where = shown.standing(stuck, stuck, shown.pulses(ranks.run_folder))
        ranks.stop()
        self._start(ranks.asked)
        told = [errors] if errors else []
        told += [
            f"interrupted, but {where}, and did not come back",
            "a rank that waits for others in a collective does not hear Ctrl-C; so all ranks were "
            "ended and started anew: their variables are gone",
            "run again the cells that define what you need, from init_process_group on",
        ]
        raise RanksError("\n".join(told))

    @property
    def _is_kernel(self) -> bool:
        return hasattr(self.shell, "kernel")

    def _place(self) -> Callable[[str], None]:
        """Return what shows a text in place of the one that it showed before."""
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


def load(shell: object) -> None:
    """Add the commands to a kernel; its ranks end with it."""
    if importlib.util.find_spec("IPython") is None:
        raise Impossible(
            "cells on ranks need IPython, which is not installed here",
            fix="pip install 'torchmuster[notebook]'",
        )
    notebook = Notebook(cast(Shell, shell))
    # The launcher notices as well when the kernel has gone; this way, they are gone when it is.
    atexit.register(notebook.stop)
    for kind, name, function in (
        ("line", "muster", notebook.muster),
        ("cell", "ranks", notebook.all_ranks),
        ("cell", "rank", notebook.some_ranks),
    ):
        notebook.shell.register_magic_function(cast(Callable[..., None], function), kind, name)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Show an error by its own words: what was asked, what is true, what to do."""
    try:
        yield
    except MusterError as error:
        raise RanksError(str(error)) from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="%muster", description="The ranks of this notebook.")
    commands = parser.add_subparsers(required=True, metavar="start|stop|restart|status|pull")
    start = commands.add_parser("start", help="start ranks")
    start.add_argument("--ranks", type=_positive, metavar="N", help="on each machine")
    start.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    start.add_argument("--gpu-ids", nargs="+", metavar="ID")
    where = start.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B:4", help="machines that ssh knows")
    where.add_argument("--nnodes", type=_positive, metavar="N", help="machines that join by a code")
    start.set_defaults(run=Notebook.start)
    for name, run, words in (
        ("stop", Notebook.stop, "end them"),
        ("restart", Notebook.restart, "end them and start the same anew"),
        ("status", Notebook.status, "what runs"),
    ):
        commands.add_parser(name, help=words).set_defaults(run=run)
    pull = commands.add_parser("pull", help="bring a variable into the notebook")
    pull.add_argument("name")
    pull.add_argument("--rank", type=int, metavar="N", help="of this one; else a list, by rank")
    pull.set_defaults(run=Notebook.pull)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _asked(options: argparse.Namespace) -> Asked:
    spec = JobSpec(
        name="notebook",
        command=(),
        module=True,
        typed=("notebook",),
        folder=str(Path.cwd()),
        device=options.device,
        ranks=options.ranks,
        gpu_ids=tuple(options.gpu_ids) if options.gpu_ids else None,
        hosts=parse_hosts([options.hosts]) if options.hosts else (),
        limits=Limits(grace_s=_GRACE_S, join_s=_JOIN_WITHIN_S if options.nnodes else Limits.join_s),
    )
    return Asked(spec=spec, guests=options.nnodes - 1 if options.nnodes else 0)


def _chosen(line: str, world_size: int) -> list[int]:
    """Read ``0`` or ``0,2-3``."""
    chosen: set[int] = set()
    for word in line.replace(",", " ").split():
        first, dash, last = word.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal():
            raise Impossible(f"{word!r} is not a rank", fix="%%rank 0, or %%rank 0,2-3")
        chosen |= set(range(int(first), int(last) + 1))
    if not chosen:
        raise Impossible("%%rank needs a rank", fix="%%rank 0, or %%ranks for all of them")
    if max(chosen) >= world_size:
        raise _no_such_rank(max(chosen), world_size)
    return sorted(chosen)


def _no_such_rank(rank: int, world_size: int) -> Impossible:
    return Impossible(f"there is no rank {rank}", why=f"{rank_words(range(world_size))} run")
