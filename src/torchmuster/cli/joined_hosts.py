"""``--join``: this machine and others that run ``muster join`` with the code that it prints."""

import argparse
import socket
from typing import Any, TextIO

from torchmuster.cli import job_flags, output
from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec, NodeCounts
from torchmuster.launch.transports.channel import Transport

# The user types muster join on each machine.
_JOIN_WITHIN_S = 1800.0
_USUAL_NODES = NodeCounts(least=2, most=2)


def add_flags(many: Any) -> None:
    """Add the flags for machines that join with a code."""
    many.add_argument(
        "--join",
        action="store_true",
        help="print a code with which other machines join (muster join CODE), without ssh; --nodes N is the number of "
        "machines with this one (default: 2)",
    )
    many.add_argument(
        "--join-port",
        type=job_flags.port,
        metavar="N",
        help="with --join: the port on which machines join (default: a free one)",
    )


def take_flags(options: argparse.Namespace) -> None:
    """Set what ``--join`` implies; refuse flags that contradict it."""
    if not options.join:
        if options.join_port is not None:
            raise Impossible(
                "--join-port works only with --join", fix="add --join, or leave it out"
            )
        return
    for name in ("slurm", "detach", "dry_run"):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise Impossible(f"--join does not work with {flag}", fix=f"leave out {flag}")
    options.nodes = options.nodes or _USUAL_NODES
    if options.nodes.most < 2:
        raise Impossible(
            "--nodes 1 leaves no machine to join", fix="--nodes 2, or leave out --join"
        )
    if not any(word.startswith("--join-timeout") for word in options.words):
        options.join_timeout = _JOIN_WITHIN_S


def transport_to_joined(options: argparse.Namespace, spec: JobSpec, stream: TextIO) -> Transport:
    """Return the transport to this machine and to those that join; the code is printed to ``stream``."""
    from torchmuster.launch.transports.join.code import JoinCode, encode_code
    from torchmuster.launch.transports.join.transport import JoinTransport
    from torchmuster.launch.transports.local import LocalTransport

    if spec.hosts:
        raise Impossible(
            "--join and --hosts (over ssh) are mutually exclusive", fix="give one of the two"
        )
    machines = options.nodes.most + spec.spares

    def show(code: JoinCode) -> None:
        # Only on the terminal: the code gives access and must not be logged.
        print("on every other machine, in a folder with the same code: muster join", file=stream)
        print("then paste this code, which lets a machine join:", file=stream)
        print(f"  {encode_code(code)}", file=stream, flush=True)

    return JoinTransport(
        local=LocalTransport(socket.gethostname()),
        count=machines - 1,
        port=options.join_port,
        on_event=lambda words: output.say(f"muster: {words}"),
        on_code=show,
    )
