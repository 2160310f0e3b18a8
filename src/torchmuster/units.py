"""Parse and format byte counts and durations, and format lists of names and ranks.

In the code a quantity is a plain number whose name has its unit (``free_bytes``, ``idle_s``);
text such as ``8GiB`` is parsed only here.
"""

import re
from collections.abc import Iterable, Sequence

KiB = 1024
MiB = 1024**2
GiB = 1024**3
TiB = 1024**4

_NAMES_SHOWN = 3
_PIECES_OF_A_LIST = 12
_MOST_S = 36500 * 86400
# A bare letter means the binary unit, as in Slurm, Docker and ``free -g``.
_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "k": KiB,
    "kib": KiB,
    "kb": 10**3,
    "m": MiB,
    "mib": MiB,
    "mb": 10**6,
    "g": GiB,
    "gib": GiB,
    "gb": 10**9,
    "t": TiB,
    "tib": TiB,
    "tb": 10**12,
}
_SECOND_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# More digits are a typo, and would not fit into a float.
_QUANTITY = re.compile(r"\s*(\d{1,18}(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Parse ``30GiB``, ``24 GB``, ``512M`` or ``1073741824`` into bytes."""
    number, unit = _split(text, "a size", "30GiB, 24GB or 512MiB")
    if unit not in _BYTE_UNITS:
        raise ValueError(
            f"{text!r} is not a size: unknown unit {unit!r}; use B, KiB, MiB, GiB or TiB"
        )
    return round(number * _BYTE_UNITS[unit])


def parse_seconds(text: str) -> float:
    """Parse ``10s``, ``5m``, ``2h``, ``1d`` or ``1.5`` into seconds."""
    number, unit = _split(text, "a duration", "30s, 5m, 2h or 1d")
    if unit not in _SECOND_UNITS:
        raise ValueError(f"{text!r} is not a duration: unknown unit {unit!r}; use s, m, h or d")
    seconds = number * _SECOND_UNITS[unit]
    if seconds > _MOST_S:
        raise ValueError(f"{text!r} is longer than {_MOST_S // 86400} days")
    return seconds


def _split(text: str, kind: str, examples: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {kind}; write for example {examples}")
    return float(match[1]), match[2].lower()


def format_bytes(count: int) -> str:
    """Format bytes with three or four figures: ``79.2 GiB``, ``512 MiB``, ``0 B``."""
    for name, size in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        amount = count / size
        if amount >= 0.9995:  # 1023.5 MiB would be rounded to 1024 MiB, which is 1.0 GiB
            return f"{amount:.1f} {name}" if amount < 99.95 else f"{amount:.0f} {name}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """Format a duration by its largest unit: ``42 s``, ``12 min``, ``3 h``, ``2 d``."""
    for name, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (name == "min" and seconds >= size):
            return f"{int(seconds // size)} {name}"
    return f"{int(seconds)} s"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 rank``, ``1,024 ranks``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def name_several(names: Sequence[str]) -> str:
    """Return the names of a few hosts; of many, the first few and the number of the others."""
    if len(names) > _NAMES_SHOWN + 1:
        return f"{', '.join(names[:_NAMES_SHOWN])} and {len(names) - _NAMES_SHOWN:,} others"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def rank_list(ranks: Iterable[int]) -> str:
    """Return ``0,2-3`` for the ranks 0, 2 and 3; a long list is truncated and shows the total."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    pieces = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    if len(pieces) > _PIECES_OF_A_LIST:
        return f"{','.join(pieces[:_PIECES_OF_A_LIST])},… ({len(ordered)} in total)"
    return ",".join(pieces)


def rank_text(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0,2-3``."""
    numbers = set(ranks)
    return f"rank{'s' if len(numbers) != 1 else ''} {rank_list(numbers)}"
