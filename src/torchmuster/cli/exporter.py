"""``muster exporter``: serve metrics of this machine and its runs to Prometheus."""

import argparse
import contextlib
import signal
import threading

from torchmuster.cli import output, parsers, serving_flags
from torchmuster.errors import ExitCode
from torchmuster.monitor.serving import Access, Served

_PORT = 9477


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster exporter``."""
    parsers.show_examples(
        parser,
        [
            "muster exporter                       serve on 127.0.0.1, for a Prometheus on this machine",
            "muster exporter --runs /shared/runs   serve the runs in another folder",
            "muster exporter --once                print the metrics, and exit",
            "muster exporter --address 0.0.0.0 --token-file token --certificate node.pem",
        ],
    )
    parsers.add_runs_flag(parser)
    serving_flags.add_serving_flags(parser, port=_PORT)
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="also export ranks of other hosts, if this is the only exporter for a shared folder",
    )
    parser.add_argument("--once", action="store_true", help="print the metrics once, and exit")
    parser.set_defaults(run=_run_exporter)


def _run_exporter(options: argparse.Namespace) -> int:
    from torchmuster.devices import snapshot
    from torchmuster.monitor.collecting.collector import Collector
    from torchmuster.monitor.metric import exposition
    from torchmuster.monitor.serving import serving

    with contextlib.ExitStack() as stack:
        look = stack.enter_context(snapshot.listening_to_events())
        collector = Collector(options.runs, look, all_ranks=options.all_ranks)
        text, _ = exposition(collector.samples(), "")  # fail now if something is missing
        if options.once:
            output.print_text(text.decode(), end="")
            return ExitCode.GOOD
        access = Access(
            address=options.address,
            port=options.port,
            token=serving_flags.token_from(options.token_file),
            tls=serving_flags.tls_from(options.certificate),
        )
        ended = threading.Event()
        metrics = Served(answer=lambda accept: exposition(collector.samples(), accept))
        healthy = Served(answer=lambda _: (b"ok\n", "text/plain"), needs_token=False)
        paths = {"/metrics": metrics, "/healthz": healthy}
        port = stack.enter_context(serving(access, paths))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        scheme = "http" if access.tls is None else "https"
        output.say(
            f"metrics of this machine and of {options.runs}: {scheme}://{access.address}:{port}/metrics"
        )
        ended.wait()
    return ExitCode.GOOD
