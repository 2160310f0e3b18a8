"""Serve the store at which ranks meet, in one of their processes."""

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def serve_store(listening: socket.socket) -> TCPStore:
    """Serve a store on a socket that is already open, until the result is deleted."""
    host, port = listening.getsockname()
    descriptor = listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
