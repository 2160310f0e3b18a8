"""``muster exporter``: serves this machine's metrics, and those of the runs on it, to Prometheus."""

import argparse
import os
import signal
import ssl
import stat
import threading
from pathlib import Path

from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode, Impossible
from torchmuster.monitor.serving import Access

_PORT = 9477


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster exporter``."""
    parsers.show_examples(
        parser,
        [
            "muster exporter                       serve on 127.0.0.1, for a Prometheus on this machine",
            "muster exporter --runs /shared/runs   the runs of another folder",
            "muster exporter --once                print the metrics, and end",
            "muster exporter --address 0.0.0.0 --token-file token --certificate node.pem",
        ],
    )
    parsers.add_runs_flag(parser)
    parser.add_argument(
        "--address", default="127.0.0.1", help="where to listen (127.0.0.1: this machine only)"
    )
    parser.add_argument(
        "--port", type=int, default=_PORT, help=f"which port ({_PORT}; 0: a free one)"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="who asks must know the word in this file, which only you may read",
    )
    parser.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="serve by TLS: a certificate and its key (PEM, in one file)",
    )
    parser.add_argument("--once", action="store_true", help="print the metrics once, and end")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from torchmuster.devices.snapshot import take
    from torchmuster.monitor.collecting.collector import Collector
    from torchmuster.monitor.exposition import exposition
    from torchmuster.monitor.serving import serving

    collector = Collector(options.runs, take)
    text, _ = exposition(collector.samples(), "")  # what is missing shows now
    if options.once:
        print(text.decode(), end="")
        return ExitCode.GOOD
    access = Access(
        address=options.address,
        port=options.port,
        token=_token(options.token_file),
        tls=_tls(options.certificate),
    )
    ended = threading.Event()
    with serving(access, lambda accept: exposition(collector.samples(), accept)) as port:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        scheme = "http" if access.tls is None else "https"
        output.say(
            f"metrics of this machine and of {options.runs}: {scheme}://{access.address}:{port}/metrics"
        )
        ended.wait()
    return ExitCode.GOOD


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        with path.open(encoding="utf-8") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            token = stream.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Impossible(
            f"the token cannot be read from {path}",
            why=str(error),
            fix=f"(umask 077; openssl rand -hex 32 > {path})",
        ) from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise Impossible(
            f"the token in {path} is no secret: others on this machine may read it",
            fix=f"chmod 600 {path}",
        )
    if len(token) < 16:
        raise Impossible(
            f"the token in {path} is too short to keep anybody out",
            why=f"it has {len(token)} characters, and 16 are the least",
            fix=f"(umask 077; openssl rand -hex 32 > {path})",
        )
    return token


def _tls(path: Path | None) -> ssl.SSLContext | None:
    if path is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(path)
    except (OSError, ssl.SSLError) as error:
        raise Impossible(
            f"the certificate cannot be read from {path}",
            why=str(error),
            fix="give a PEM file that has the certificate and its private key, without a password",
        ) from error
    return context
