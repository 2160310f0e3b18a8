"""What a metric is: a name that keeps its meaning, a unit, and who it speaks about."""

import enum
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """What Prometheus calls the type: a gauge goes up and down, a counter only up until it begins anew."""

    GAUGE = "gauge"
    COUNTER = "counter"


class Scope(enum.Enum):
    """What one series of a metric is about; its value are the labels that name it."""

    HOST = ("host",)
    RUN = ("job", "run")
    RANK = ("job", "run", "host", "rank")
    DEVICE = ("host", "gpu_uuid")


class Level(enum.StrEnum):
    """When a metric is there."""

    ALWAYS = "always"  # with every run of `muster train`, from its first line on
    SOMETIMES = "sometimes"  # where a run has it: a gradient norm where gradients are clipped
    DEVICE = "device"  # on machines with an accelerator whose driver tells


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric: how it is called, what it counts in, and what it says.

    ``labels`` are those besides its scope's; each has few values, which ``help`` names.
    """

    name: str
    unit: str
    help: str
    scope: Scope
    kind: Kind = Kind.GAUGE
    level: Level = Level.ALWAYS
    labels: tuple[str, ...] = ()

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The labels of its series, in their order."""
        return (*self.scope.value, *self.labels)


@dataclass(frozen=True, slots=True)
class Sample:
    """What a metric is at one moment, for one thing it speaks about."""

    metric: Metric
    labels: tuple[str, ...]  # in the order of ``metric.all_labels``
    value: float
