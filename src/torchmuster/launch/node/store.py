"""Serve the ranks' ``TCPStore`` on sockets that are already open, until standard input closes.

Run by its path on the first host. Standard input is a Unix socket, over which the node agent passes a listening socket for each
attempt with its address and port. It has opened that socket when it chose the port, so that no other process can take the port
in between. In a process of its own the store outlives rank 0, as torchrun's does, and a restart does not import torch for it.
"""

import json
import os
import socket
import sys
from typing import Any

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_LONGEST_ADDRESS = 4096


def serve(address: str, port: int, descriptor: int) -> Any:
    """Serve a store on a socket that is already open, until the result is deleted."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )


def main() -> None:
    """Open a store's server for each socket that arrives; the one before is closed."""
    if sys.platform == "linux":
        import ctypes

        # As in supervisor.py: this file runs by its path, without torchmuster.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    import torch.distributed  # noqa: F401  before the first store is wanted

    node_agent = socket.socket(fileno=0)
    server = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(node_agent, _LONGEST_ADDRESS, 1)
        if not message:
            os._exit(0)
        del server
        address, port = json.loads(message)
        server = serve(address, port, descriptors[0])


if __name__ == "__main__":
    main()
