"""The exporter: samples as Prometheus metrics over HTTP, by ``prometheus_client``.

Prometheus has its own authentication for scraping: mutual TLS, in which the client shows a
certificate that an agreed authority signed. Without it, only this host may read the metrics.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from torchmuster.errors import Impossible
from torchmuster.monitor.metric import MetricKind, Sample

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The server's certificate with its key (PEM, one file), and the authority of its clients."""

    certificate: Path
    client_ca: Path


@contextmanager
def serve_metrics(
    collect: Callable[[], Sequence[Sample]],
    *,
    address: str = LOOPBACK,
    port: int = 0,
    tls: Tls | None = None,
    no_auth: bool = False,
) -> Iterator[int]:
    """Serve what ``collect`` returns within this context; yield the port (0 picks a free one)."""
    if tls is None and not no_auth and not is_loopback(address):
        raise Impossible(
            f"cannot serve metrics on {address} without authentication",
            why="every client that reaches this address could read the names of runs and hosts, "
            "the losses and the state of the GPUs",
            fix="--certificate FILE --client-ca FILE for mutual TLS, or --no-auth if the network "
            "is trusted",
        )
    registry = _registry(collect)
    from prometheus_client import start_http_server

    encryption: dict[str, Any] = {}
    if tls is not None:
        encryption = {
            "certfile": str(tls.certificate),
            "keyfile": str(tls.certificate),
            "client_cafile": str(tls.client_ca),
            "client_auth_required": True,
        }
    try:
        server, thread = start_http_server(port, address, registry, **encryption)
    except OSError as error:
        raise Impossible(
            f"cannot serve metrics on {address}:{port}",
            why=error.strerror or str(error),
            fix="--port 0 picks a free port and prints it; certificates are PEM files, that of this server with "
            "its private key",
        ) from error
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def metrics_text(samples: Sequence[Sample]) -> str:
    """Return samples in Prometheus' text format."""
    registry = _registry(lambda: samples)
    from prometheus_client import generate_latest

    return generate_latest(registry).decode()


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach an address."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _registry(collect: Callable[[], Sequence[Sample]]) -> Any:
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise Impossible(
            "cannot serve metrics: the package prometheus_client is not installed",
            why="it writes the Prometheus text format",
            fix="pip install 'torchmuster[watch]'",
        ) from error
    registry = CollectorRegistry()
    registry.register(_Families(collect))
    return registry


class _Families:
    """A collector of ``prometheus_client``: the samples, grouped by metric."""

    def __init__(self, samples: Callable[[], Sequence[Sample]]) -> None:
        self._samples = samples

    def describe(self) -> list[Any]:
        """Return nothing: registering collects no samples."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {MetricKind.COUNTER: CounterMetricFamily, MetricKind.GAUGE: GaugeMetricFamily}
        families: dict[str, Any] = {}
        for sample in self._samples():
            metric = sample.metric
            if metric.name not in families:
                family = kinds[metric.kind](metric.name, metric.help, labels=metric.all_labels)
                families[metric.name] = family
            families[metric.name].add_metric(sample.labels, sample.value)
        yield from families.values()
