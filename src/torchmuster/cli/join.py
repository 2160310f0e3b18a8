"""``muster join``: join a run that another machine started with ``muster run --join``."""

import asyncio
import getpass
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import output
from torchmuster.cli.options import argument, command, flag
from torchmuster.redaction import harmless
from torchmuster.units import parse_seconds

if TYPE_CHECKING:
    from torchmuster.launch.transports.join.code import JoinCode

CODE_VARIABLE = "TORCHMUSTER_JOIN"


@dataclass(frozen=True, kw_only=True)
class JoinCommandOptions:
    """The flags of ``muster join``."""

    code: str | None = argument(
        f"the code that the host printed (default: ${CODE_VARIABLE}, or standard input); other users of this "
        "machine can see an argument",
        metavar="CODE",
    )
    patience: float = flag(
        "give up if the host cannot be reached for DURATION (default: 2m)",
        default=120.0,
        parse=parse_seconds,
        metavar="DURATION",
    )


@command(
    JoinCommandOptions,
    more="""
    Runs what the host sends, in this folder, as this user: join only hosts that you trust. Sends
    nothing to a host whose certificate does not match the code.
    """,
    examples=[
        "muster join          asks for the code that muster run --join printed",
        "muster join < FILE   reads it from standard input",
    ],
)
def run(options: JoinCommandOptions) -> int:
    """Join, and return the exit code of the run on this host."""
    from torchmuster.launch.node import supervisor
    from torchmuster.launch.transports.join.code import decode_code

    code = decode_code(_read_code(options.code))
    supervisor.continue_supervised()
    return asyncio.run(_join(code, options.patience))


def _read_code(typed: str | None) -> str:
    # The ranks, which inherit the environment, do not need it.
    from_environment = os.environ.pop(CODE_VARIABLE, "")
    if typed is not None:
        _say(
            "note: other users of this machine can see the code; without it, muster join asks for it"
        )
        return typed
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
