"""The arguments of ``%muster`` and ``%%rank``."""

import argparse
from pathlib import Path
from typing import NoReturn

from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec, Limits, parse_hosts
from torchmuster.launch.launcher.console import rank_text
from torchmuster.notebook.cell import RanksRequest

_GRACE_S = 2.0
_JOIN_WITHIN_S = 1800.0  # time for the user to type the command on each host


class HelpShown(Exception):
    """Raised after printing help."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Impossible(message, fix=self.format_usage().rstrip())

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown


def magic_parser() -> argparse.ArgumentParser:
    """Return the parser of ``%muster``; the action is in ``command``."""
    words = _Parser(prog="%muster", description="Manage the ranks of this notebook.")
    commands = words.add_subparsers(
        dest="command", required=True, metavar="start|stop|restart|status|pull"
    )
    start = commands.add_parser("start", help="start ranks")
    start.add_argument("--ranks", type=_positive, metavar="N", help="number of ranks on each host")
    start.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    start.add_argument("--gpu-ids", nargs="+", metavar="ID")
    where = start.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B:4", help="hosts to connect to over ssh")
    where.add_argument(
        "--nnodes",
        type=_positive,
        metavar="N",
        help="number of hosts, including this one; the others join with a code",
    )
    commands.add_parser("stop", help="stop the ranks")
    commands.add_parser("restart", help="stop the ranks and start new ones")
    commands.add_parser("status", help="show the running ranks")
    pull = commands.add_parser("pull", help="copy a variable into the notebook")
    pull.add_argument("name")
    pull.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="copy from this rank only (default: a list of the values of all ranks)",
    )
    return words


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def requested_ranks(options: argparse.Namespace) -> RanksRequest:
    """Return the ranks requested by ``%muster start``."""
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
    """Parse ``0`` or ``0,2-3``."""
    ranks: set[int] = set()
    for word in line.replace(",", " ").split():
        first, dash, last = word.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal():
            raise Impossible(f"{word!r} is not a rank", fix="%%rank 0, or %%rank 0,2-3")
        ranks |= set(range(int(first), int(last) + 1))
    if not ranks:
        raise Impossible("%%rank requires a rank", fix="%%rank 0, or %%ranks for all of them")
    if max(ranks) >= world_size:
        raise no_such_rank(max(ranks), world_size)
    return sorted(ranks)


def no_such_rank(rank: int, world_size: int) -> Impossible:
    """Return the error for a rank that does not exist."""
    return Impossible(f"there is no rank {rank}", why=f"running: {rank_text(range(world_size))}")
