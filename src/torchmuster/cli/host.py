"""``muster host``: start a script here; other machines join with a code, without ssh."""

import argparse
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torchmuster.cli import job_flags, output, parsers
from torchmuster.cli.launching import stay
from torchmuster.cli.reporting import with_report
from torchmuster.cli.scripts import script_from
from torchmuster.errors import Impossible
from torchmuster.launch.job import NodeCounts
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import create_run_folder

if TYPE_CHECKING:
    from torchmuster.launch.transports.join.code import JoinCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster host``."""
    parser.usage = "muster host --nnodes N [options] script.py [the script's own arguments]"
    parser.description = (
        f"{parser.description}\nPrints a command to paste on each other machine. Each command "
        "works once, for "
        "one machine and only\nwith this host: its code contains a token and the fingerprint of "
        "this "
        "host's certificate."
    )
    parsers.show_examples(
        parser,
        [
            "muster host --nnodes 2 train.py",
            "muster host --nnodes 3 --device cpu --ranks 2 train.py --lr 1e-4",
        ],
    )
    parser.add_argument(
        "--nnodes",
        type=_range,
        required=True,
        metavar="N",
        help="number of machines without spares, including this one; with 2:4, the run continues on 2 if others are lost",
    )
    job_flags.add_machine_flags(parser)
    many = job_flags.add_rendezvous_flags(parser)
    job_flags.add_spares_flag(many)
    many.add_argument(
        "--join-port",
        type=job_flags.port,
        metavar="N",
        help="port on which others join (default: a free one)",
    )
    found = many.add_mutually_exclusive_group()
    found.add_argument(
        "--short-codes",
        action="store_true",
        help="print codes without addresses; others find this host on the local network",
    )
    found.add_argument(
        "--no-announce", action="store_true", help="do not announce this host on the local network"
    )
    job_flags.add_resume_flag(job_flags.add_run_flags(parser))
    # The user starts muster join on each machine.
    parser.set_defaults(run=_run_host, command=None, join_timeout=1800.0)


def _run_host(options: argparse.Namespace) -> int:
    script = script_from(options, Path.cwd())
    resolved = job_flags.settings_of(options)
    spec = job_flags.job_from(options, resolved, script)
    if spec.hosts:
        raise Impossible(
            "muster host does not work with launch.hosts",
            why="it waits for machines to join; launch.hosts is for connections over ssh",
            fix="use muster run for ssh, or leave out launch.hosts",
        )
    if options.nnodes.most + spec.spares < 2:
        raise Impossible(
            "--nnodes 1 leaves no machine to join", fix="use muster run, or --nnodes 2 or more"
        )
    transport = transport_for_guests(
        options.nnodes.most + spec.spares,
        port=options.join_port,
        announce=not options.no_announce,
        short=options.short_codes,
        stream=sys.stdout,
    )
    spec = job_flags.with_spares(spec, options.nnodes.most + spec.spares)
    spec = job_flags.with_nodes(spec, options.nnodes)
    run = create_run_folder(options.runs, spec.name)
    return with_report(run, lambda: stay(spec, transport, run))


def transport_for_guests(
    nodes: int,
    *,
    port: int | None = None,
    announce: bool = True,
    short: bool = False,
    stream: TextIO,
) -> Transport:
    """Return the transport to this machine and to those that join; prints codes to ``stream``."""
    from torchmuster.launch.network import interfaces
    from torchmuster.launch.transports.hosting import HostTransport

    addresses = [one.address for one in interfaces.interface_candidates()]
    if not addresses:
        raise Impossible(
            "this machine has no network address",
            why="other machines cannot join over loopback",
            fix="connect it to a network; ip address  # shows its addresses",
        )
    # Printed on the terminal only: codes give access and must not be logged.
    return HostTransport(
        socket.gethostname(),
        nodes=nodes,
        addresses=addresses,
        port=port,
        announce=announce,
        on_event=lambda words: output.say(f"muster: {words}"),
        on_code=lambda place, code: _show_host(place, code.short() if short else code, stream),
    )


def _range(text: str) -> NodeCounts:
    """Parse a number of machines, including this one, or minimum and maximum: 2:4."""
    if ":" not in text:
        return NodeCounts(least=machines(text), most=machines(text))
    return job_flags.nodes(text)


def machines(text: str) -> int:
    """Parse a number of machines, including this one."""
    from torchmuster.launch.transports.join.code import MOST_PLACES

    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= MOST_PLACES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_PLACES}")
    return number


def _show_host(place: int, code: "JoinCode", stream: TextIO) -> None:
    from torchmuster.launch.transports.join.code import encode_code

    print(f"on machine {place + 1}, in a folder with the same code, paste:", file=stream)
    print(f"  muster join {encode_code(code)}", file=stream, flush=True)
