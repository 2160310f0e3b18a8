"""``muster join``: join a run that another machine hosts, with the code it printed."""

import argparse
import asyncio
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import output, parsers
from torchmuster.cli.job_flags import duration
from torchmuster.redaction import harmless

if TYPE_CHECKING:
    from torchmuster.launch.transports.join.code import JoinCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster join``."""
    parser.description = (
        f"{parser.description}\nRuns only scripts and modules in this folder, with this "
        "machine's Python, "
        "and accepts only\nvariables that can neither load code nor name a file; --trust-host "
        "removes both "
        "limits. Sends\nnothing to a host whose certificate does not match the code."
    )
    parsers.show_examples(
        parser,
        [
            "muster join CODE                 the command that muster host printed",
            "muster join --trust-host CODE    run any command that the host sends, as this user",
        ],
    )
    parser.add_argument("code", nargs="+", metavar="CODE", help="the code that the host printed")
    parser.add_argument(
        "--patience",
        type=duration,
        default=120.0,
        metavar="DURATION",
        help="give up if the host cannot be reached for DURATION (default: 2m)",
    )
    parser.add_argument(
        "--no-discovery", action="store_true", help="do not look for the host on the local network"
    )
    parser.add_argument(
        "--trust-host",
        action="store_true",
        help="run any command with any variables for the host (default: only code in this folder)",
    )
    parser.set_defaults(run=_run_join)


def _run_join(options: argparse.Namespace) -> int:
    from torchmuster.launch.transports.join.code import decode_code

    code = decode_code(" ".join(options.code))
    return asyncio.run(_join(code, options))


async def _join(code: "JoinCode", options: argparse.Namespace) -> int:
    from torchmuster.launch.network import firewall
    from torchmuster.launch.node.node_agent import NodeAgent
    from torchmuster.launch.transports.join.client import connect_to_host

    channel = await connect_to_host(
        code,
        on_event=_say,
        open_firewall=firewall.open_command_anywhere,
        discover=not options.no_discovery,
        patience_s=options.patience,
    )
    _say("joined; waiting for the host to start the run; Ctrl-C leaves")
    folder = Path.cwd()
    allowed = None
    if options.trust_host:
        _say("the host may run any command as this user (--trust-host)")
    else:
        from torchmuster.launch.node import join_policy

        allowed = functools.partial(join_policy.check_join_policy, folder=folder)
        _say(f"the host may start only code in {folder}")
    agent = NodeAgent(channel, folder=folder, allowed=allowed, tell=_say)
    exit_code = await agent.run()
    _say(agent.words or "the host has stopped the run")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a thread may still be waiting for GPUs


def _say(words: str) -> None:
    for line in harmless(words).splitlines():
        output.say(f"muster: {line}")
