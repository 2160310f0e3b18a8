"""``muster exporter``: serve metrics of this machine and its runs to Prometheus."""

import argparse
import contextlib
import signal
import threading
from pathlib import Path

from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode, Impossible
from torchmuster.monitor.exporter import LOOPBACK, Tls, is_loopback

_PORT = 9477


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster exporter``."""
    parsers.show_examples(
        parser,
        [
            "muster exporter                       serve on 127.0.0.1, for a Prometheus on this machine",
            "muster exporter --runs /shared/runs   serve the runs in another folder",
            "muster exporter --once                print the metrics, and exit",
            "muster exporter --address 0.0.0.0 --certificate node.pem --client-ca prometheus-ca.pem",
        ],
    )
    parsers.add_runs_flag(parser)
    parser.add_argument(
        "--address", default=LOOPBACK, help=f"address to listen on (default: {LOOPBACK})"
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=_PORT,
        help=f"port to listen on (default: {_PORT}; 0 picks a free port)",
    )
    parser.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="serve over TLS: a certificate and its key (PEM, in one file)",
    )
    parser.add_argument(
        "--client-ca",
        type=Path,
        metavar="FILE",
        help="accept only clients with a certificate of this authority (PEM)",
    )
    parser.add_argument(
        "--no-auth",
        action="store_true",
        help="serve other addresses than loopback to everybody who reaches them",
    )
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="also export ranks of other hosts, if this is the only exporter for a shared folder",
    )
    parser.add_argument("--once", action="store_true", help="print the metrics once, and exit")
    parser.set_defaults(run=_run_exporter)


def _port(text: str) -> int:
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write a number from 0 to 65535")
    return number


def _run_exporter(options: argparse.Namespace) -> int:
    from torchmuster.devices import snapshot
    from torchmuster.monitor.collecting.collector import Collector
    from torchmuster.monitor.exporter import metrics_text, serve_metrics

    tls = _tls(options.certificate, options.client_ca)
    with contextlib.ExitStack() as stack:
        look = stack.enter_context(snapshot.listening_to_events())
        collector = Collector(options.runs, look, all_ranks=options.all_ranks)
        text = metrics_text(collector.samples())  # fail now if something is missing
        if options.once:
            output.print_text(text, end="")
            return ExitCode.GOOD
        port = stack.enter_context(
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
            f"{scheme}://{options.address}:{port}/metrics"
        )
        if tls is None and not is_loopback(options.address):
            output.say(
                f"warning: everybody who reaches {options.address}:{port} can read the names of "
                "runs and hosts, the losses and the state of the GPUs"
            )
        ended.wait()
    return ExitCode.GOOD


def _tls(certificate: Path | None, client_ca: Path | None) -> Tls | None:
    if certificate is None and client_ca is None:
        return None
    if certificate is None or client_ca is None:
        raise Impossible(
            "mutual TLS needs both --certificate and --client-ca",
            why="the server shows the first, and accepts clients whose certificate the second "
            "signed",
            fix="give both files, or neither",
        )
    return Tls(certificate=certificate, client_ca=client_ca)
