"""Serve the ranks' ``TCPStore`` on a socket that is already open, until standard input closes.

Run by its path on the first host. The node agent has opened the socket, on one address, when it chose the port, so that no
other process can take the port in between. In a process of its own, the store outlives rank 0, as torchrun's does.
"""

import os
import sys

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9


def main(descriptor: int, address: str, port: int) -> None:
    """Open the store's server, and keep it until the node agent closes standard input or ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    import torch.distributed as dist

    server = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )
    sys.stdin.buffer.read()
    del server
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
