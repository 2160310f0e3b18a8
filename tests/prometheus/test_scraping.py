"""A real Prometheus reads a real run: every metric, every query of the dashboard, alerts that arrive."""

import json
from collections.abc import Callable
from pathlib import Path

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from prometheus.prometheus_lab import Prometheus, await_until, prometheus, webhook
from prometheus.watched_training import CONFIG, exporter, training
from torchmuster.monitor import catalogue

DASHBOARD = Path("deploy/grafana/torchmuster.json").resolve()
# What a run has besides what all have: its gradients are clipped, its losses scaled, it evaluates and saves.
RICH = CONFIG.replace(
    "train: {", "train: {clip_norm: 1, precision: fp16, evaluate_every: 20, "
).replace("data: {", 'data: {evaluation: "own:few", ')
NOT_HERE = {
    catalogue.TOKENS_RATE: "the loss counts no tokens",
    catalogue.MFU: "nobody knows what a CPU can do at most",
    catalogue.GPU_THROTTLED: "the GPUs are well",
}


def test_prometheus_sees_everything_of_a_run(
    machine: Callable[[Scenario], Path], tmp_path: Path
) -> None:
    machine(scenarios.eight_a100())
    with (
        webhook() as heard,
        exporter(tmp_path) as (port, _),
        prometheus(tmp_path, [port], alerts_to=heard.address) as server,
    ):
        with training(tmp_path, "--max-restarts", "0", config=RICH) as it:
            others = {one.name for one in catalogue.METRICS if one not in NOT_HERE}
            await_until(lambda: others <= server.names(), f"{others - server.names()}")
            _check_queries(server)
            await_until(lambda: _ranks(server) == {("0", "watched"), ("1", "watched")}, "its ranks")
            it.begin("broken")
            assert it.process.wait(GIVE_UP_S) == 1
            failed = heard.next_alert("MusterRunFailed")
        assert failed["status"] == "firing"
        assert failed["labels"]["job"] == "watched"
        assert failed["labels"]["run"] == it.run.id
        assert failed["annotations"]["fix"] == f"muster explain {it.run.id}"


def _ranks(server: Prometheus) -> set[tuple[str, str]]:
    """Return the ranks that it knows of, each with its job; none after a look that took too long."""
    found = server.query(catalogue.RANK_STEP.name)
    return {(one["metric"]["rank"], one["metric"]["job"]) for one in found}


def _check_queries(server: Prometheus) -> None:
    """Every picture of the dashboard shows something, on a machine whose GPUs are well."""
    empty_while_well = {catalogue.GPU_THROTTLED.name}
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert targets
    for query in [target["expr"] for target in targets]:
        name = query.partition("{")[0]
        if name in empty_while_well:
            continue
        for variable in ("job", "run", "host"):
            query = query.replace(f"${variable}", ".*")
        await_until(lambda query=query: bool(server.query(query)), f"data for {query}")  # type: ignore[misc]
