"""``python -m torchmuster.launch.node``: a node agent.

Its launcher is at the other end of standard input and output, or, with a node index, at the address in the join code that is
the first line of standard input.
"""

import argparse
import asyncio
import os
import sys
import threading

from torchmuster.errors import MusterError
from torchmuster.launch.node import supervisor
from torchmuster.launch.node.connection import AgentConnection, PipeConnection
from torchmuster.launch.node.node_agent import NodeAgent

# The launcher listens before it starts the node agents: only a firewall or a busy host can delay this.
_CONNECTED_WITHIN_S = 60.0


async def _keep(place: int | None, *, is_local: bool) -> None:
    end: AgentConnection = PipeConnection() if place is None else await connect_as(place)
    code = await NodeAgent(end, is_local=is_local).run()
    sys.stderr.flush()
    os._exit(code)  # a thread may still be waiting for the launcher, or for GPUs


async def connect_as(place: int) -> AgentConnection:
    """Read the join code from standard input, and connect to the launcher as this node."""
    from torchmuster.launch.transports.join.client import connect_to_host
    from torchmuster.launch.transports.join.code import decode_code

    line = await asyncio.to_thread(sys.stdin.buffer.readline)
    if not line:
        sys.exit("the launcher is gone")
    channel = await connect_to_host(
        decode_code(line.decode(errors="replace")),
        place=place,
        on_event=lambda text: print(text, file=sys.stderr, flush=True),
        patience_s=_CONNECTED_WITHIN_S,
    )
    loop = asyncio.get_running_loop()

    def watch() -> None:
        """Disconnect when srun is gone, and with it the launcher or the job."""
        sys.stdin.buffer.read()
        asyncio.run_coroutine_threadsafe(channel.close(), loop)

    threading.Thread(target=watch, daemon=True).start()
    return channel


def main() -> None:
    """Serve the launcher."""
    supervisor.serve_below()
    parser = argparse.ArgumentParser(prog="python -m torchmuster.launch.node")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--place", type=int, help="the node index; the join code is on stdin")
    where.add_argument(
        "--place-from",
        metavar="VARIABLE",
        help="read the node index from this environment variable",
    )
    where.add_argument("--local", action="store_true", help="the launcher is on this host")
    options = parser.parse_args()
    place = options.place
    if options.place_from:
        place = int(os.environ[options.place_from])
    try:
        asyncio.run(_keep(place, is_local=options.local))
    except MusterError as error:
        sys.exit("\n".join(filter(None, (error.what, error.why, error.fix))))


if __name__ == "__main__":
    main()
