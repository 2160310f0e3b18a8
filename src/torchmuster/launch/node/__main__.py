"""``python -m torchmuster.launch.node``: a node agent on standard input and output."""

import argparse
import asyncio
import os
import sys

from torchmuster.launch.node.connection import PipeConnection
from torchmuster.launch.node.node_agent import NodeAgent


async def _keep(place: int | None) -> None:
    code = await NodeAgent(PipeConnection(place)).run()
    sys.stderr.flush()
    os._exit(code)  # a thread may still be waiting for the launcher, or for GPUs


def main() -> None:
    """Serve the launcher at the other end of the pipe."""
    parser = argparse.ArgumentParser(prog="python -m torchmuster.launch.node")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--place", type=int, help="read only the lines addressed to this node index")
    where.add_argument(
        "--place-from",
        metavar="VARIABLE",
        help="read the node index from this environment variable",
    )
    parser.add_argument(
        "--first-place", type=int, default=0, help="add this to the value of --place-from"
    )
    options = parser.parse_args()
    place = options.place
    if options.place_from:
        place = options.first_place + int(os.environ[options.place_from])
    asyncio.run(_keep(place))


if __name__ == "__main__":
    main()
