"""The arguments of ``%muster`` and ``%%rank``."""

import argparse
from typing import NoReturn

from torchmuster.errors import Impossible
from torchmuster.units import rank_text


class HelpShown(Exception):
    """Raised after printing help."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Impossible(message, fix=self.format_usage().rstrip())

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown


def magic_parser() -> argparse.ArgumentParser:
    """Return the parser of ``%muster``; the action is in ``command``."""
    parser = _Parser(prog="%muster", description="Manage the ranks of this notebook.")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="start|stop|restart|status"
    )
    start = commands.add_parser("start", help="start ranks")
    start.add_argument(
        "--ranks", type=_positive, metavar="N", help="number of ranks (default: one per GPU)"
    )
    start.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    start.add_argument("--gpu-ids", nargs="+", metavar="ID")
    commands.add_parser("stop", help="stop the ranks")
    commands.add_parser("restart", help="stop the ranks and start new ones")
    commands.add_parser("status", help="show the running ranks")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def run_flags(options: argparse.Namespace) -> list[str]:
    """Return the flags of ``%muster start`` as those of ``muster run``."""
    flags = ["--device", options.device]
    if options.ranks is not None:
        flags += ["--ranks", str(options.ranks)]
    if options.gpu_ids:
        flags += ["--gpu-ids", ",".join(options.gpu_ids)]
    return flags


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
        raise Impossible(
            f"there is no rank {max(ranks)}", why=f"running: {rank_text(range(world_size))}"
        )
    return sorted(ranks)
