"""A line of a run's metrics as every sink takes it: numbers by name, at a step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Table = Literal["train", "evaluation"]
TABLES: tuple[Table, ...] = ("train", "evaluation")
# These are no curves: where a row is, and when it was written.
_PLACE = ("step", "at_unix_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Numbers of one step; their names begin with the table's, as trackers group curves by it."""

    table: Table
    step: int
    at_unix_s: float  # 0 where the line does not tell
    numbers: Mapping[str, float]


def row_of(table: Table, line: Mapping[str, Any]) -> Row | None:
    """Return a line of the metrics as a row; None for one that is not about a step."""
    step, at_unix_s = line.get("step"), line.get("at_unix_s")
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    numbers = {
        f"{table}/{name}": float(value)
        for name, value in line.items()
        if name not in _PLACE and isinstance(value, int | float) and not isinstance(value, bool)
    }
    if table == "train" and "loss" in line:
        # One that is not finite was written as null, and must not look like one that is missing.
        numbers.setdefault("train/loss", math.nan)
    written_s = float(at_unix_s) if isinstance(at_unix_s, int | float) else 0.0
    return Row(table=table, step=step, at_unix_s=written_s, numbers=numbers)
