"""The sink interface, the available sinks and their settings."""

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from torchmuster.config.settings import Settings
from torchmuster.errors import ConfigError
from torchmuster.redaction import redact_mapping
from torchmuster.runfolder import RunFolder

Table = Literal["train", "evaluation"]
TABLES: tuple[Table, ...] = ("train", "evaluation")
# Not curves: a row's position and time.
_PLACE = ("step", "at_unix_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Values of one step; names start with the table's name, by which trackers group curves."""

    table: Table
    step: int
    at_unix_s: float  # 0 if the line has no time
    numbers: Mapping[str, float]


def row_of(table: Table, line: Mapping[str, Any]) -> Row | None:
    """Return a metrics line as a row; None if it is not about a step."""
    step, at_unix_s = line.get("step"), line.get("at_unix_s")
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    numbers = {
        f"{table}/{name}": float(value)
        for name, value in line.items()
        if name not in _PLACE and isinstance(value, int | float) and not isinstance(value, bool)
    }
    if table == "train" and "loss" in line:
        # Non-finite values are written as null and must differ from missing ones.
        numbers.setdefault("train/loss", math.nan)
    written_s = float(at_unix_s) if isinstance(at_unix_s, int | float) else 0.0
    return Row(table=table, step=step, at_unix_s=written_s, numbers=numbers)


_KINDS = {
    "tensorboard": "torchmuster.monitor.sinks.to_tensorboard:TensorBoard",
    "mlflow": "torchmuster.monitor.sinks.to_mlflow:MLflow",
    "wandb": "torchmuster.monitor.sinks.to_wandb:WandB",
}


class Sink(Protocol):
    """Receives the rows of one run, in the order of their steps.

    One thread outside the training process uses it: it may block, and it may raise any error of its
    library. Then it is discarded, and the rows are sent to a new one.
    """

    run: str  # the tracker's id of the run, stored and passed to the next sink; "" if it has none

    def write(self, rows: Sequence[Row]) -> None:
        """Send rows; rows that are repeated after a failure must not be duplicated."""
        ...

    def take_back(self, step: int) -> bool:
        """Withdraw this step and all later ones before repeating them; False if not supported.

        Without support, the repeated rows are not sent again.
        """
        ...

    def close(self, *, finished: bool) -> None:
        """Close the run, which has ``finished`` or may resume later."""
        ...


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the sinks, serializable for another process."""

    sinks: tuple[str, ...] = ()
    experiment: str = "experiment"


def wanted_by(settings: Settings) -> Wanted:
    """Translate settings."""
    return Wanted(sinks=settings.metrics.sinks, experiment=settings.experiment_name)


def open_sink(name: str, run: RunFolder, wanted: Wanted, known: str) -> Sink:
    """Open a sink; ``known`` is the tracker's id of the run from an earlier open."""
    module, _, kind = _KINDS[name].partition(":")
    sink: Sink = getattr(importlib.import_module(module), kind)(run, wanted, known)
    return sink


def settings_of(run: RunFolder) -> Mapping[str, str]:
    """Return the settings in the run folder (without secrets), for display in trackers."""
    from torchmuster.config.resolve import resolve_settings

    if not run.config.is_file():
        return {}
    try:
        values = redact_mapping(resolve_settings(file=run.config).values())
    except ConfigError:  # of another version
        return {}
    return {
        path: value if isinstance(value, str) else json.dumps(value)
        for path, value in values.items()
        if value not in (None, (), [])
    }
