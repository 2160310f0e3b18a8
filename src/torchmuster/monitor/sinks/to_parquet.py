"""The metrics as tables in the run's folder: ``metrics/steps.parquet`` and ``metrics/evaluations.parquet``.

Parquet files cannot be appended to, so they are rewritten from the JSON lines: when the number of
lines has doubled, and at the end. The JSON lines are always complete.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchmuster.monitor.sinks.sink import Row, Wanted
from torchmuster.runfolder import RunFolder

_FILES = ("steps", "evaluations")
_FEW = 1000
# A column that is null in every line would have no dtype.
_WHOLE = ("step", "epoch", "samples", "skipped_steps", "memory_peak_bytes")
_NUMBERS = (
    *("at_unix_s", "loss", "learning_rate", "gradient_norm", "samples_per_s", "tokens_per_s"),
    *("step_s", "data_share", "compute_share", "communication_share", "checkpoint_share"),
    *("evaluation_share", "flop_s", "mfu"),
)


class Parquet:
    """Writes tables from the JSON lines."""

    run = ""

    def __init__(self, run: RunFolder, wanted: Wanted, known: str) -> None:
        import pyarrow.json
        import pyarrow.parquet

        self._arrow: Any = pyarrow
        self._folder = run.metrics
        self._written = 0
        self._new = 0

    def write(self, rows: Sequence[Row]) -> None:
        """Count the rows, and rewrite the tables if due."""
        self._new += len(rows)
        if self._new >= max(_FEW, self._written):
            self._write_all()

    def take_back(self, step: int) -> bool:
        """Return True: the JSON lines no longer have those steps, so the tables will not either."""
        return True

    def close(self, *, finished: bool) -> None:
        """Write all rows."""
        self._write_all()

    def _write_all(self) -> None:
        self._written, self._new = self._written + self._new, 0
        for name in _FILES:
            if (lines := self._folder / f"{name}.jsonl").is_file():
                self._convert(lines, self._folder / f"{name}.parquet")

    def _convert(self, lines: Path, table: Path) -> None:
        data = lines.read_bytes()
        data = data[: data.rfind(b"\n") + 1]  # the rest is being written
        if not data:
            table.unlink(missing_ok=True)
            return
        arrow = self._arrow
        types = [(name, arrow.int64()) for name in _WHOLE]
        types += [(name, arrow.float64()) for name in _NUMBERS] + [("verdict", arrow.string())]
        of_steps = arrow.schema(types) if table.stem == _FILES[0] else None
        how = arrow.json.ParseOptions(explicit_schema=of_steps)
        content = arrow.json.read_json(arrow.BufferReader(data), parse_options=how)
        temporary = table.with_name(f".{table.name}.{os.urandom(4).hex()}")
        try:
            arrow.parquet.write_table(content, temporary)
            temporary.replace(table)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
