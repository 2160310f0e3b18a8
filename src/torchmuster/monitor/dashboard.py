"""The Grafana dashboard: panels over the catalogue's metrics, as importable JSON."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchmuster.monitor import catalogue
from torchmuster.monitor.metric import Metric, Scope

_WIDTH, _HEIGHT = 24, 8
# Grafana's names of the units.
_UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "percentunit",
    "celsius": "celsius",
    "watts": "watt",
    "joules": "joule",
    "": "short",
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel: queries with their legends."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]  # PromQL, legend
    width: int = 8


def _of(metric: Metric, legend: str) -> tuple[str, str]:
    chosen = (
        'job=~"$job",run=~"$run"' if metric.scope in (Scope.RUN, Scope.RANK) else 'host=~"$host"'
    )
    return f"{metric.name}{{{chosen}}}", legend


def _panel(title: str, *metrics: tuple[Metric, str], width: int = 8) -> Panel:
    return Panel(
        title=title,
        unit=_UNITS[metrics[0][0].unit],
        queries=tuple(_of(metric, legend) for metric, legend in metrics),
        width=width,
    )


_RUN = "{{run}}"
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Training",
        (
            _panel("loss", (catalogue.LOSS, _RUN)),
            _panel("samples per second", (catalogue.SAMPLES_RATE, _RUN)),
            _panel("step time", (catalogue.STEP_TIME, _RUN)),
            _panel("time breakdown", (catalogue.TIME_SHARE, "{{part}}")),
            _panel("learning rate", (catalogue.LEARNING_RATE, _RUN)),
            _panel("time since the last step", (catalogue.STEP_AGE, _RUN)),
            _panel("goodput", (catalogue.GOODPUT, _RUN), width=6),
            _panel("age of the newest checkpoint", (catalogue.CHECKPOINT_AGE, _RUN), width=6),
            _panel("steps", (catalogue.STEPS, _RUN), width=6),
            _panel(
                "skipped steps and restarts",
                (catalogue.SKIPPED_STEPS, "skipped"),
                (catalogue.RUN_RESTARTS, "restarts"),
                width=6,
            ),
        ),
    ),
    (
        "Ranks",
        (
            _panel("ranks with a recent heartbeat", (catalogue.RUN_RANKS, _RUN)),
            _panel("waiting for data", (catalogue.RANK_DATA, "rank {{rank}}")),
            _panel("waiting for other ranks", (catalogue.RANK_WAITING, "rank {{rank}}")),
            _panel("memory", (catalogue.RANK_MEMORY, "rank {{rank}}"), width=12),
            _panel("CPUs used", (catalogue.RANK_CPUS, "rank {{rank}}"), width=12),
        ),
    ),
    (
        "GPUs",
        (
            _panel("utilization", (catalogue.GPU_UTILIZATION, "{{host}} {{gpu_uuid}}")),
            _panel("memory", (catalogue.GPU_MEMORY_USED, "{{host}} {{gpu_uuid}}")),
            _panel("temperature", (catalogue.GPU_TEMPERATURE, "{{host}} {{gpu_uuid}}")),
            _panel("power", (catalogue.GPU_POWER, "{{host}} {{gpu_uuid}}")),
            _panel("throttled", (catalogue.GPU_THROTTLED, "{{gpu_uuid}} {{reason}}")),
            _panel("memory errors", (catalogue.GPU_ECC, "{{gpu_uuid}} {{kind}}")),
            _panel("energy", (catalogue.GPU_ENERGY, "{{host}} {{gpu_uuid}}"), width=12),
            _panel("critical errors", (catalogue.GPU_XID, "{{gpu_uuid}} Xid {{xid}}"), width=12),
            _panel("waiting requests", (catalogue.QUEUE_REQUESTS, "{{host}}")),
            _panel("claimed GPUs", (catalogue.GPUS_CLAIMED, "{{host}}")),
        ),
    ),
    (
        "Hosts",
        (
            _panel("CPU utilization", (catalogue.HOST_CPU, "{{host}}"), width=6),
            _panel("memory available", (catalogue.HOST_MEMORY_AVAILABLE, "{{host}}"), width=6),
            _panel("disk free", (catalogue.HOST_DISK_FREE, "{{host}}"), width=6),
            Panel(
                title="network",
                unit="Bps",
                queries=(
                    (
                        f'rate({catalogue.HOST_NETWORK.name}{{host=~"$host"}}[1m])',
                        "{{host}} {{direction}}",
                    ),
                ),
                width=6,
            ),
        ),
    ),
)


def queries() -> Iterator[str]:
    """Yield every query of the dashboard."""
    for _, panels in ROWS:
        for panel in panels:
            yield from (query for query, _ in panel.queries)


def dashboard() -> str:
    """Return the dashboard as JSON."""
    content = {
        "title": "torchmuster",
        "uid": "torchmuster",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "tags": ["torchmuster"],
        "annotations": {"list": [_alerts()]},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "source"},
                _variable("job", f"label_values({catalogue.RUN_PHASE.name}, job)"),
                _variable("run", f'label_values({catalogue.RUN_PHASE.name}{{job=~"$job"}}, run)'),
                _variable("host", f"label_values({catalogue.HOST_CPU.name}, host)"),
            ]
        },
        "panels": list(_panels()),
    }
    return json.dumps(content, indent=1) + "\n"


_SOURCE = {"type": "prometheus", "uid": "${source}"}


def _alerts() -> dict[str, Any]:
    return {
        "name": "alerts",
        "datasource": _SOURCE,
        "enable": True,
        "expr": 'ALERTS{alertname=~"Muster.*",alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "iconColor": "red",
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
        "sort": 2,
    }


def _panels() -> Iterator[dict[str, Any]]:
    number = y = 0
    for title, panels in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"h": 1, "w": _WIDTH, "x": 0, "y": y},
            "panels": [],
        }
        y, x = y + 1, 0
        for panel in panels:
            if x + panel.width > _WIDTH:
                y, x = y + _HEIGHT, 0
            number += 1
            place = {"h": _HEIGHT, "w": panel.width, "x": x, "y": y}
            yield _dashboard_as_json(panel, number, place)
            x += panel.width
        y += _HEIGHT


def _dashboard_as_json(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    print(dashboard(), end="")
