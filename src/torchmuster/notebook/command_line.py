"""The arguments of ``%muster`` and ``%%rank``."""

import shlex

from torchmuster.errors import Impossible
from torchmuster.units import rank_text

USAGE = "%muster start [flags of muster run], %muster stop, or %muster restart"
_ELSEWHERE = ("--hosts", "--nodes", "--join", "--slurm", "--detach")


def action_and_flags(line: str) -> tuple[str, list[str]]:
    """Split a line of ``%muster`` into its action and, of ``start``, the flags of ``muster run``."""
    action, *flags = shlex.split(line) or [""]
    if action not in ("start", "stop", "restart"):
        raise Impossible(f"{action!r} is not an action of %muster", fix=USAGE)
    if flags and action != "start":
        raise Impossible(f"%muster {action} takes no flags", fix=USAGE)
    for flag in flags:
        if flag.partition("=")[0] in _ELSEWHERE:
            raise Impossible(
                f"{flag} does not work in a notebook",
                why="the ranks of a notebook run on its host, as long as its kernel",
                fix=f"write the cells into a script: muster run {flag}",
            )
    return action, flags


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
