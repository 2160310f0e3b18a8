"""Asking a name server directly, to tell one that does not answer from one that does not know."""

import ipaddress
import os
import socket
import struct

_PORT = 53
_WITHIN_S = 1.0
_TRIES = 2  # one packet may be lost
_RECURSE = 0x0100
_POINTER, _INTERNET = 12, 1


def is_silent(server: str, address: str, *, port: int = _PORT) -> bool:
    """Say whether a server lets the question for an address's name go unanswered.

    Any answer counts, a refusal too. One that cannot be reached at all is not silent: then looking up
    fails at once.
    """
    labels = ipaddress.ip_address(address).reverse_pointer.encode().split(b".")
    name = b"".join(bytes([len(one)]) + one for one in labels) + b"\0"
    header = os.urandom(2) + struct.pack(">HHHHH", _RECURSE, 1, 0, 0, 0)
    question = header + name + struct.pack(">HH", _POINTER, _INTERNET)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            server, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as asking:
            asking.settimeout(_WITHIN_S)
            asking.connect(place)
            return not any(_answered(asking, question) for _ in range(_TRIES))
    except OSError:
        return False


def _answered(asking: socket.socket, question: bytes) -> bool:
    asking.send(question)
    try:
        return asking.recv(512)[:2] == question[:2]
    except TimeoutError:
        return False
