"""MLflow: one MLflow run per run folder, found by its id or by a tag with the folder's name."""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torchmuster.monitor.sinks.sink import Row, Wanted, settings_of
from torchmuster.runfolder import RunFolder

_TAG = "torchmuster.run"
_MOST_METRICS = 1000  # MLflow's limit per request
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 6000
# The client retries for minutes; here a later retry is fine. Values set by the user are kept.
_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class MLflow:
    """Sends rows with the MLflow client, which handles address and authentication."""

    def __init__(self, run: RunFolder, wanted: Wanted, known: str) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow import entities

        self._entities: Any = entities
        self._client: Any = mlflow.MlflowClient()  # address and keys are in the environment
        self.run = known
        if not known:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", wanted.experiment)
            experiment = self._experiment(name)
            # An earlier process may have created the run without storing its id.
            self.run = self._found(experiment, run.id) or self._made(experiment, run)
        self._client.update_run(self.run, status="RUNNING")

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _found(self, experiment: str, run: str) -> str:
        which = f"tags.`{_TAG}` = '{run}'"
        runs = self._client.search_runs([experiment], filter_string=which, max_results=1)
        return str(runs[0].info.run_id) if runs else ""

    def _made(self, experiment: str, run: RunFolder) -> str:
        made = self._client.create_run(experiment, run_name=run.id, tags={_TAG: run.id})
        identity = str(made.info.run_id)
        parameters = [
            self._entities.Param(name, value[:_LONGEST_PARAMETER])
            for name, value in settings_of(run).items()
        ]
        for begin in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(identity, params=parameters[begin : begin + _MOST_PARAMETERS])
        return identity

    def write(self, rows: Sequence[Row]) -> None:
        """Send rows; repeated rows have the same timestamp, which MLflow stores once."""
        metrics = [one for row in rows for one in self._metrics(row)]
        for begin in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self.run, metrics=metrics[begin : begin + _MOST_METRICS])

    def _metrics(self, row: Row) -> Iterator[Any]:
        for name, number in row.numbers.items():
            allowed = re.sub(r"[^\w\-./ :]", "_", name)
            yield self._entities.Metric(allowed, number, round(row.at_unix_s * 1000), row.step)

    def take_back(self, step: int) -> bool:
        """Return False: MLflow cannot withdraw steps."""
        return False

    def close(self, *, finished: bool) -> None:
        """Record how the run ended; a resumed run sets it to running again."""
        self._client.set_terminated(self.run, status="FINISHED" if finished else "FAILED")
