"""A node of a group other than the launcher's (schedulers/node_group.py): serve the launcher, and every later one."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from torchmuster.errors import ExitCode, MusterError
from torchmuster.launch.node.node_agent import NodeAgent
from torchmuster.launch.schedulers.node_group import FINAL, NodeGroup
from torchmuster.launch.transports.join.certificate import pin_from_seed
from torchmuster.launch.transports.join.client import HostChannel, connect_to_host
from torchmuster.launch.transports.join.code import JoinCode

_LOOK_EVERY_S, _LOOK_AT_LEAST_EVERY_S = 2.0, 30.0


def serve_group(
    group: NodeGroup, root: Path, *, patience_s: float, say: Callable[[str], None]
) -> int:
    """Serve the launchers of this group until the run is over; return the exit code for the scheduler.

    Without a launcher for ``patience_s``, it is 75: the scheduler may start this node again.
    """

    async def work() -> int:
        code = await _serve(group, root, patience_s, say)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(
            code
        )  # not after asyncio.run: a thread may still be waiting for GPUs, or for a disk

    return asyncio.run(work())


async def _serve(
    group: NodeGroup, root: Path, patience_s: float, say: Callable[[str], None]
) -> int:
    key = group.key()
    code = JoinCode(secret=key.secret, pin=pin_from_seed(key.seed), port=group.port)
    while True:
        try:
            end = await _connect(group, root, code, patience_s, say)
        except MusterError as error:
            for line in filter(None, (error.what, error.why, error.fix)):
                say(line)
            return ExitCode.SAVED if type(error) is MusterError else error.exit_code
        if isinstance(end, int):
            return end
        say(f"connected to the launcher at {end.host}, as node rank {group.node_rank}")
        agent = NodeAgent(end)
        exit_code = await agent.run()
        say(agent.why_exited or "the launcher has released this node")
        if agent.signalled:
            return ExitCode.TERMINATED
        if agent.released and exit_code in FINAL:
            return exit_code
        say("waiting for the launcher to come back")


async def _connect(
    group: NodeGroup, root: Path, code: JoinCode, patience_s: float, say: Callable[[str], None]
) -> HostChannel | int:
    """Return the connection to the launcher, or the exit code if the run is over."""
    # Thousands of nodes must not overload the name service and the disk while they wait.
    every_s = min(max(_LOOK_EVERY_S, group.nodes / 100), _LOOK_AT_LEAST_EVERY_S)
    connecting = asyncio.create_task(
        connect_to_host(
            code,
            on_event=say,
            place=group.node_rank,
            patience_s=patience_s,
            name=group.launcher,
            longest_pause_s=every_s,
        )
    )
    try:
        while True:
            await asyncio.wait({connecting}, timeout=every_s)
            if connecting.done():
                return connecting.result()
            # The launcher may have exited while this node was being replaced.
            ended = await asyncio.to_thread(group.ended, root)
            if ended is not None:
                return ended
    finally:
        connecting.cancel()
