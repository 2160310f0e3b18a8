"""The catalogue and the alerts as a page of the documentation."""

from collections.abc import Iterable, Iterator, Sequence

from torchmuster.monitor.alerts.rules import ALERTS
from torchmuster.monitor.catalogue import METRICS
from torchmuster.monitor.metric import Level, Metric, Scope

_HEAD = """\
# Metrics and alerts

Made from the code by `python -m torchmuster.monitor.document`; [Watching with Prometheus](prometheus.md) says how to read them.

Series are named by the labels in the tables: `job` is the run's name, `run` its id, `rank` a rank's number, `gpu_uuid` what
`muster gpus` shows. "Sometimes": where the run has it, such as a gradient norm where gradients are clipped.
"""
_TITLES = {
    Scope.RUN: "Runs and their training",
    Scope.RANK: "Ranks",
    Scope.DEVICE: "GPUs",
    Scope.HOST: "Machines",
}
_LEVELS = {Level.ALWAYS: "", Level.SOMETIMES: "sometimes", Level.DEVICE: "if the driver tells"}


def metrics_document() -> str:
    """Return the page."""
    parts = [_HEAD]
    for scope, title in _TITLES.items():
        labels = ", ".join(f"`{one}`" for one in scope.value)
        parts.append(f"\n## {title}\n\nLabels: {labels}\n\n")
        rows = [_document_row(one) for one in METRICS if one.scope is scope]
        parts += _document_table(("metric", "type", "what it says", "there"), rows)
    parts.append("\n## Alerts\n\n")
    alerts = [
        (f"`{one.name}`", one.severity, f"`{one.condition.promql()}`", _after(one.for_s), one.why)
        for one in ALERTS
    ]
    parts += _document_table(("alert", "severity", "when", "for", "why"), alerts)
    return "".join(parts)


def _document_row(metric: Metric) -> Sequence[str]:
    more = "".join(f"; label `{one}`" for one in metric.labels)
    return f"`{metric.name}`", metric.kind.value, metric.help + more, _LEVELS[metric.level]


def _after(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds else "at once"


def _document_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        cells = " | ".join(cell.replace("|", "\\|") for cell in row)
        yield f"| {cells} |\n"


if __name__ == "__main__":
    print(metrics_document(), end="")
