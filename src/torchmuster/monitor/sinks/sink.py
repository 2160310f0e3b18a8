"""What a sink is, which ones there are, and what they have to know."""

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


_KINDS = {
    "tensorboard": "torchmuster.monitor.sinks.to_tensorboard:TensorBoard",
    "parquet": "torchmuster.monitor.sinks.to_parquet:Parquet",
    "mlflow": "torchmuster.monitor.sinks.to_mlflow:MLflow",
    "wandb": "torchmuster.monitor.sinks.to_wandb:WandB",
}


class Sink(Protocol):
    """Takes the rows of one run, in the order of their steps.

    One thread uses it, beside the training and never in it: it may wait, and it may raise whatever its library
    raises. Then it is thrown away, and the rows are given to a new one.
    """

    run: str  # the tracker's own name of the run, which is kept and given to the next one; "" if it has none

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows; those that it is given a second time after a failure must not be there twice."""
        ...

    def take_back(self, step: int) -> bool:
        """Forget this step and all after it, as they are made again; False where that cannot be done.

        Who cannot is not given them again.
        """
        ...

    def close(self, *, finished: bool) -> None:
        """Let go of the run, which has ``finished`` or will perhaps go on later."""
        ...


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings say about sinks, in a form that can be handed to another process."""

    sinks: tuple[str, ...] = ()
    experiment: str = "experiment"
    mlflow_uri: str | None = None
    mlflow_experiment: str | None = None
    wandb_project: str | None = None
    wandb_mode: str = "offline"
    anew: bool = False  # a new run at the tracker, whatever was there before


def wanted_by(settings: Settings, *, anew: bool = False) -> Wanted:
    """Translate settings."""
    metrics = settings.metrics
    return Wanted(
        sinks=metrics.sinks,
        experiment=settings.experiment_name,
        mlflow_uri=metrics.mlflow_uri,
        mlflow_experiment=metrics.mlflow_experiment,
        wandb_project=metrics.wandb_project,
        wandb_mode=metrics.wandb_mode,
        anew=anew,
    )


def open_sink(name: str, run: RunFolder, wanted: Wanted, known: str) -> Sink:
    """Open a sink; ``known`` is what the tracker called the run when it was opened before."""
    module, _, kind = _KINDS[name].partition(":")
    sink: Sink = getattr(importlib.import_module(module), kind)(run, wanted, known)
    return sink


def settings_of(run: RunFolder) -> Mapping[str, str]:
    """Return the settings of a run as its folder has them, so without secrets; trackers show them beside the curves."""
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
