"""``muster join``: join a run that another machine started with ``muster run --join``."""

import argparse
import asyncio
import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import output, parsers
from torchmuster.cli.options import duration
from torchmuster.redaction import harmless

if TYPE_CHECKING:
    from torchmuster.launch.transports.join.code import JoinCode

CODE_VARIABLE = "TORCHMUSTER_JOIN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster join``."""
    parser.description = (
        f"{parser.description}\nRuns what the host sends, in this folder, as this user: join only "
        "hosts that you trust. Sends\nnothing to a host whose certificate does not match the code."
    )
    parsers.show_examples(
        parser,
        [
            "muster join          asks for the code that muster run --join printed",
            "muster join < FILE   reads it from standard input",
        ],
    )
    parser.add_argument(
        "code",
        metavar="CODE",
        nargs="?",
        help=f"the code that the host printed (default: ${CODE_VARIABLE}, or standard input); other users of this "
        "machine can see an argument",
    )
    parser.add_argument(
        "--patience",
        type=duration,
        default=120.0,
        metavar="DURATION",
        help="give up if the host cannot be reached for DURATION (default: 2m)",
    )
    parser.set_defaults(run=_run_join)


def _run_join(options: argparse.Namespace) -> int:
    from torchmuster.launch.node import supervisor
    from torchmuster.launch.transports.join.code import decode_code

    code = decode_code(_read_code(options.code))
    supervisor.continue_supervised()
    return asyncio.run(_join(code, options.patience))


def _read_code(argument: str | None) -> str:
    # The ranks, which inherit the environment, do not need it.
    from_environment = os.environ.pop(CODE_VARIABLE, "")
    if argument is not None:
        _say(
            "note: other users of this machine can see the code; without it, muster join asks for it"
        )
        return argument
    if from_environment:
        return from_environment
    if sys.stdin.isatty():
        return getpass.getpass("join code: ")
    return sys.stdin.readline()


async def _join(code: "JoinCode", patience_s: float) -> int:
    from torchmuster.launch.node.node_agent import NodeAgent
    from torchmuster.launch.transports.join.client import connect_to_host

    folder = Path.cwd()
    _say(f"joining lets the host run commands as {getpass.getuser()} in {folder}")
    channel = await connect_to_host(code, on_event=_say, patience_s=patience_s)
    _say("joined; waiting for the host to start the run; Ctrl-C leaves")
    agent = NodeAgent(channel, folder=folder, tell=_say)
    exit_code = await agent.run()
    _say(agent.words or "the host has stopped the run")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a thread may still be waiting for GPUs


def _say(text: str) -> None:
    for line in harmless(text).splitlines():
        output.say(f"muster: {line}")
