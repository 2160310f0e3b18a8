"""What a metric is: a name that keeps its meaning, a unit, and who it speaks about."""

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.errors import Impossible


class MetricKind(enum.StrEnum):
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
    kind: MetricKind = MetricKind.GAUGE
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


def exposition(samples: Sequence[Sample], accept: str) -> tuple[bytes, str]:
    """Return the text and its content type: OpenMetrics for who accepts it, else Prometheus' own."""
    try:
        from prometheus_client.exposition import choose_encoder
    except ImportError as error:
        raise Impossible(
            "metrics cannot be served: the package prometheus_client is not installed here",
            why="it writes the format that Prometheus reads",
            fix="pip install 'torchmuster[watch]'",
        ) from error
    encode, content_type = choose_encoder(accept)
    return encode(_Families(samples)), content_type


class _Families:
    """What the client library asks for metrics: a registry, as far as it is used."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Any]:
        by_metric: dict[Metric, list[Sample]] = {}
        for sample in self._samples:
            by_metric.setdefault(sample.metric, []).append(sample)
        for metric, samples in by_metric.items():
            yield _family(metric, samples)


def _family(metric: Metric, samples: Sequence[Sample]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    made = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = made(metric.name, metric.help, labels=metric.all_labels)
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family
