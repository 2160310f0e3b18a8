"""Metrics: name, unit, scope and labels; their text format."""

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.errors import Impossible


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


class Level(enum.StrEnum):
    """When a metric is available."""

    ALWAYS = "always"  # in every `muster train` run, from its first step line on
    SOMETIMES = "sometimes"  # if the run has it: a gradient norm if gradients are clipped
    DEVICE = "device"  # on hosts with an accelerator whose driver reports it


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric: name, unit and meaning.

    ``labels`` are added to the labels of its scope; each has few values, listed in ``help``.
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
    """The value of a metric at one moment, for one label set."""

    metric: Metric
    labels: tuple[str, ...]  # in the order of ``metric.all_labels``
    value: float


def exposition(samples: Sequence[Sample], accept: str) -> tuple[bytes, str]:
    """Return the text and its content type: OpenMetrics if accepted, else Prometheus."""
    try:
        from prometheus_client.exposition import choose_encoder
    except ImportError as error:
        raise Impossible(
            "cannot serve metrics: the package prometheus_client is not installed",
            why="it writes the Prometheus text format",
            fix="pip install 'torchmuster[watch]'",
        ) from error
    encode, content_type = choose_encoder(accept)
    return encode(_Families(samples)), content_type


class _Families:
    """The part of a registry that the client library uses."""

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
