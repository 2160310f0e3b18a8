"""Samples as the text that Prometheus reads, by its own client library."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchmuster.errors import Impossible
from torchmuster.monitor.metric import Kind, Metric, Sample


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

    made = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = made(metric.name, metric.help, labels=metric.all_labels)
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family
