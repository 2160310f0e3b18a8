"""A port for a server that a test starts."""

import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 that no other program is given for a minute.

    A connection to it was closed on its side, so the port is in TIME_WAIT: the system gives it to nobody who
    asks for any port, but a server that asks for this one (with SO_REUSEADDR, as servers do) gets it.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address):
            server.accept()[0].close()
    return int(address[1])
