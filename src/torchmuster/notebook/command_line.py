"""The words after ``%muster`` and ``%%rank``, and what they ask for."""

import argparse
from pathlib import Path
from typing import NoReturn

from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec, Limits, parse_hosts
from torchmuster.launch.launcher.console import rank_text
from torchmuster.notebook.cell import RanksRequest

_GRACE_S = 2.0
_JOIN_WITHIN_S = 1800.0  # people walk from one machine to the next


class HelpShown(Exception):
    """Somebody asked for help, and there is nothing else to do."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Impossible(message, fix=self.format_usage().rstrip())

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown


def magic_parser() -> argparse.ArgumentParser:
    """Return the parser of ``%muster``; ``command`` says what is asked for."""
    words = _Parser(prog="%muster", description="The ranks of this notebook.")
    commands = words.add_subparsers(
        dest="command", required=True, metavar="start|stop|restart|status|pull"
    )
    start = commands.add_parser("start", help="start ranks")
    start.add_argument("--ranks", type=_positive, metavar="N", help="on each machine")
    start.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    start.add_argument("--gpu-ids", nargs="+", metavar="ID")
    where = start.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B:4", help="machines that ssh knows")
    where.add_argument("--nnodes", type=_positive, metavar="N", help="machines that join by a code")
    commands.add_parser("stop", help="end them")
    commands.add_parser("restart", help="end them and start the same anew")
    commands.add_parser("status", help="what runs")
    pull = commands.add_parser("pull", help="bring a variable into the notebook")
    pull.add_argument("name")
    pull.add_argument("--rank", type=int, metavar="N", help="of this one; else a list, by rank")
    return words


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def requested_ranks(options: argparse.Namespace) -> RanksRequest:
    """Return the ranks that ``%muster start`` asks for."""
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
    return RanksRequest(spec=spec, guests=options.nnodes - 1 if options.nnodes else 0)


def chosen_ranks(line: str, world_size: int) -> list[int]:
    """Read ``0`` or ``0,2-3``."""
    ranks: set[int] = set()
    for word in line.replace(",", " ").split():
        first, dash, last = word.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal():
            raise Impossible(f"{word!r} is not a rank", fix="%%rank 0, or %%rank 0,2-3")
        ranks |= set(range(int(first), int(last) + 1))
    if not ranks:
        raise Impossible("%%rank needs a rank", fix="%%rank 0, or %%ranks for all of them")
    if max(ranks) >= world_size:
        raise no_such_rank(max(ranks), world_size)
    return sorted(ranks)


def no_such_rank(rank: int, world_size: int) -> Impossible:
    """Return the refusal of a rank that is not there."""
    return Impossible(f"there is no rank {rank}", why=f"{rank_text(range(world_size))} run")
