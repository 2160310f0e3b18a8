"""TensorBoard, MLflow and W&B: each receives the rows of one run through its own client library."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import ConfigError
from torchmuster.redaction import redact_mapping
from torchmuster.runfolder import RunFolder

_MLFLOW_TAG = "torchmuster.run"
_LONGEST_PARAMETER = 6000
# MLflow's client retries for minutes; here the next attempt is as good. Values set by the user stay.
_MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Values of one step; names start with ``train/`` or ``evaluation/``."""

    step: int
    at_unix_s: float  # 0 if the line has no time
    numbers: Mapping[str, float]


class Tracker(Protocol):
    """Receives rows in one thread; it may block, and it may raise any error of its library."""

    run: str  # the tracker's id of the run, which a later attempt continues; "" if it has none

    def write(self, rows: Sequence[Row]) -> None:
        """Send rows."""
        ...

    def close(self, *, finished: bool) -> None:
        """Close the run, which has ``finished`` or may resume later."""
        ...


class TensorBoard:
    """Event files in a folder: ``tensorboard --logdir runs`` shows all runs."""

    run = ""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = Event
        self._summary: Any = Summary
        self._writer = EventFileWriter(str(Path(folder)))

    def write(self, rows: Sequence[Row]) -> None:
        """Add a point to each curve, for each row."""
        for row in rows:
            self.add(row.numbers, row.step, row.at_unix_s)
        self._writer.flush()

    def add(self, numbers: Mapping[str, float], step: int, at_unix_s: float = 0.0) -> None:
        """Add a point to each of these curves; a thread of TensorBoard writes them."""
        points = []
        for name, number in numbers.items():
            points.append(self._summary.Value(tag=name, simple_value=number))
        summary = self._summary(value=points)
        event = self._event(wall_time=at_unix_s or time.time(), step=step, summary=summary)
        self._writer.add_event(event)

    def close(self, *, finished: bool = True) -> None:
        """Write what is left."""
        self._writer.close()


class MLflow:
    """One MLflow run per run folder; later attempts continue it by its id."""

    def __init__(self, run: RunFolder, experiment: str, known: str) -> None:
        for name, value in _MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow import entities

        self._entities: Any = entities
        self._client: Any = mlflow.MlflowClient()  # address and keys are in the environment
        self.run = known or self._create(run, experiment)
        self._client.update_run(self.run, status="RUNNING")

    def _create(self, run: RunFolder, experiment: str) -> str:
        """Create the run with its settings as parameters; return its id."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment)
        existing = self._client.get_experiment_by_name(name)
        if existing is None:
            experiment_id = self._client.create_experiment(name)
        else:
            experiment_id = existing.experiment_id
        tags = {_MLFLOW_TAG: run.id}
        created = self._client.create_run(experiment_id, run_name=run.id, tags=tags)
        parameters = []
        for key, value in settings_of(run).items():
            parameters.append(self._entities.Param(key, value[:_LONGEST_PARAMETER]))
        self._client.log_batch(created.info.run_id, params=parameters)
        return str(created.info.run_id)

    def write(self, rows: Sequence[Row]) -> None:
        """Send rows; the client divides them among requests."""
        metrics = []
        for row in rows:
            for name, number in row.numbers.items():
                allowed = re.sub(r"[^\w\-./ :]", "_", name)
                at_ms = round(row.at_unix_s * 1000)
                metrics.append(self._entities.Metric(allowed, number, at_ms, row.step))
        self._client.log_batch(self.run, metrics=metrics)

    def close(self, *, finished: bool) -> None:
        """Record how the run ended; a resumed run sets it to running again."""
        self._client.set_terminated(self.run, status="FINISHED" if finished else "FAILED")


class WandB:
    """One W&B run with the folder's id, offline unless ``WANDB_MODE=online``."""

    def __init__(self, run: RunFolder, experiment: str, known: str) -> None:
        import wandb

        self.run = known or run.id
        mode = os.environ.get("WANDB_MODE")
        self._run: Any = wandb.init(
            id=self.run,
            name=run.id,
            project=os.environ.get("WANDB_PROJECT", experiment),
            dir=str(run.metrics),
            mode="online" if mode == "online" else "offline",
            resume="allow",
            config=dict(settings_of(run)),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        # An evaluation arrives after its step: only W&B's own counter may not go back.
        self._run.define_metric("*", step_metric="step")

    def write(self, rows: Sequence[Row]) -> None:
        """Send rows."""
        for row in rows:
            self._run.log({"step": row.step, **row.numbers})

    def close(self, *, finished: bool) -> None:
        """Record how the run ended, and wait until W&B has received everything."""
        self._run.finish(exit_code=0 if finished else 1)


def open_tracker(name: str, run: RunFolder, experiment: str, known: str) -> Tracker:
    """Open a tracker; ``known`` is its id of the run from an earlier attempt."""
    match name:
        case "tensorboard":
            return TensorBoard(run.metrics / "tensorboard")
        case "mlflow":
            return MLflow(run, experiment, known)
        case "wandb":
            return WandB(run, experiment, known)
    raise ValueError(f"unknown tracker {name!r}")


def settings_of(run: RunFolder) -> Mapping[str, str]:
    """Return the settings in the run folder (without secrets), for display in trackers."""
    if not run.config.is_file():
        return {}
    try:
        values = redact_mapping(resolve_settings(file=run.config).values())
    except ConfigError:  # of another version
        return {}
    settings = {}
    for path, value in values.items():
        if value not in (None, (), []):
            settings[path] = value if isinstance(value, str) else json.dumps(value)
    return settings
