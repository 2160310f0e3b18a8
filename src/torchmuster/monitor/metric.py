"""Metrics: name, scope and labels."""

import enum
from dataclasses import dataclass


class MetricKind(enum.StrEnum):
    """Prometheus' metric type: a gauge goes up and down, a counter increases until reset."""

    GAUGE = "gauge"
    COUNTER = "counter"


class Scope(enum.Enum):
    """What one series of a metric describes; the value lists its labels."""

    HOST = ("host",)
    RUN = ("job", "run")
    RANK = ("job", "run", "host", "rank")
    DEVICE = ("host", "gpu_uuid")


@dataclass(frozen=True)
class Metric:
    """One metric: its name, which ends in its unit, its scope and its meaning.

    ``labels`` are added to the labels of its scope; each has few values, listed in ``help``.
    """

    name: str
    scope: Scope
    help: str
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> MetricKind:
        """Whether it counts, which its name tells."""
        if self.name.endswith("_total"):
            return MetricKind.COUNTER
        return MetricKind.GAUGE

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The labels of its series, in their order."""
        return (*self.scope.value, *self.labels)


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of a metric at one moment, for one label set."""

    metric: Metric
    labels: tuple[str, ...]  # in the order of ``metric.all_labels``
    value: float
