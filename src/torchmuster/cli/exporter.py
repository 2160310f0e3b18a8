"""``muster exporter``: serve metrics of this machine and its runs to Prometheus."""

import contextlib
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from torchmuster.cli import output
from torchmuster.cli.options import RunsOptions, command, flag
from torchmuster.errors import ExitCode, Impossible
from torchmuster.monitor.exporter import LOOPBACK, Tls

PORT = 9477


def port(text: str) -> int:
    """Parse a port; 0 picks a free one."""
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number <= 65535:
        raise ValueError(f"{text!r} is not a port; write a number from 0 to 65535")
    return number


@dataclass(frozen=True, kw_only=True)
class ExporterOptions(RunsOptions):
    """The flags of ``muster exporter``."""

    address: str = flag(f"address to listen on (default: {LOOPBACK})", default=LOOPBACK)
    port: int = flag(
        f"port to listen on (default: {PORT}; 0 picks a free port)", default=PORT, parse=port
    )
    certificate: Path | None = flag(
        "serve over TLS: a certificate and its key (PEM, in one file)", parse=Path, metavar="FILE"
    )
    client_ca: Path | None = flag(
        "accept only clients with a certificate of this authority (PEM)",
        parse=Path,
        metavar="FILE",
    )
    no_auth: bool = flag(
        "serve other addresses than loopback to everybody who reaches them", default=False
    )
    once: bool = flag("print the metrics once, and exit", default=False)


@command(
    ExporterOptions,
    examples=[
        "muster exporter                       serve on 127.0.0.1, for a Prometheus on this machine",
        "muster exporter --runs /shared/runs   serve the runs in another folder",
        "muster exporter --once                print the metrics, and exit",
        "muster exporter --address 0.0.0.0 --certificate node.pem --client-ca prometheus-ca.pem",
    ],
)
def run(options: ExporterOptions) -> int:
    """Serve the metrics until SIGINT or SIGTERM."""
    from torchmuster.devices.readers.nvml import keep_nvml_open
    from torchmuster.devices.snapshot import take_snapshot
    from torchmuster.monitor.collecting.collector import Collector
    from torchmuster.monitor.exporter import metrics_text, serve_metrics

    tls = None
    if options.certificate is not None or options.client_ca is not None:
        if options.certificate is None or options.client_ca is None:
            raise Impossible(
                "mutual TLS needs both --certificate and --client-ca",
                fix="give both files, or neither",
            )
        tls = Tls(certificate=options.certificate, client_ca=options.client_ca)
    with contextlib.ExitStack() as stack:
        stack.enter_context(keep_nvml_open())
        collector = Collector(options.runs, take_snapshot)
        text = metrics_text(collector.samples())  # fail now if something is missing
        if options.once:
            output.print_text(text, end="")
            return ExitCode.GOOD
        bound = stack.enter_context(
            serve_metrics(
                collector.samples,
                address=options.address,
                port=options.port,
                tls=tls,
                no_auth=options.no_auth,
            )
        )
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        scheme = "http" if tls is None else "https"
        output.say(
            f"metrics of this machine and of {options.runs}: "
            f"{scheme}://{options.address}:{bound}/metrics"
        )
        ended.wait()
    return ExitCode.GOOD
