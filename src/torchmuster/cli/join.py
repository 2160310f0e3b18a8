"""``muster join``: join a run that another machine started with ``muster run --join``."""

import asyncio
import getpass
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import output
from torchmuster.cli.options import argument, command

if TYPE_CHECKING:
    from torchmuster.launch.transports.join.code import JoinCode

CODE_VARIABLE = "TORCHMUSTER_JOIN"
PATIENCE_S = 120.0  # for a host that cannot be reached


@dataclass(frozen=True, kw_only=True)
class JoinCommandOptions:
    """The flags of ``muster join``."""

    code: str | None = argument(
        f"the code that the host printed (default: ${CODE_VARIABLE}, or standard input); other users of this "
        "machine can see an argument",
        metavar="CODE",
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

    supervisor.continue_supervised()
    code = decode_code(_read_code(options.code))
    return asyncio.run(_join(code))


def _read_code(typed: str | None) -> str:
    # The ranks, which inherit the environment, do not need it.
    from_environment = os.environ.pop(CODE_VARIABLE, "")
    if typed is not None:
        output.say_event(
            "note: other users of this machine can see the code; without it, muster join asks for it"
        )
        return typed
    if from_environment:
        return from_environment
    if sys.stdin.isatty():
        return getpass.getpass("join code: ")
    return sys.stdin.readline()


async def _join(code: "JoinCode") -> int:
    from torchmuster.launch.node.node_agent import NodeAgent
    from torchmuster.launch.transports.join.client import connect_to_host

    folder = Path.cwd()
    output.say_event(f"joining lets the host run commands as {getpass.getuser()} in {folder}")
    channel = await connect_to_host(code, on_event=output.say_event, patience_s=PATIENCE_S)
    output.say_event("joined; waiting for the host to start the run; Ctrl-C leaves")
    agent = NodeAgent(channel, folder=folder, tell=output.say_event)
    exit_code = await agent.run()
    output.say_event(agent.why_exited or "the host has stopped the run")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a thread may still be waiting for GPUs
