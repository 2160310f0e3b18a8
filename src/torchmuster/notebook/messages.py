"""The messages between the notebook and its ranks, and their authentication.

A message is a 4-byte big-endian length and that many bytes of MessagePack, decoded into
these types only: nothing is unpickled. Before the first message both sides prove that they have the
key, with a fixed number of bytes that need no parser. The key itself is never sent.
"""

import hashlib
import hmac
import os
import socket

import msgspec

# Redacted by name in all output; removed from a rank's environment at startup.
SECRET_VARIABLE = "TORCHMUSTER_NOTEBOOK_SECRET"  # noqa: S105  # a variable's name
SECRET_BYTES = 32
_NONCE_BYTES = 32
_MAC_BYTES = 32
_RANK_BYTES = 4


class Run(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Run a cell; ``name`` is its file name in tracebacks."""

    request: int
    name: str
    code: str


class Wrote(msgspec.Struct, frozen=True, kw_only=True, tag="wrote"):
    """Text that a rank's Python code printed."""

    text: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """A cell has finished: its last expression as text, or the traceback.

    ``wrote_to_log``: output that bypassed Python; it arrives through the rank's log.
    """

    request: int
    value: str = ""
    error: str = ""
    interrupted: bool = False
    wrote_to_log: bool = False


FromRank = Wrote | Done


class NotTheOther(Exception):
    """The other side does not have the key."""


def new_secret() -> bytes:
    """Return a key for one start of ranks."""
    return os.urandom(SECRET_BYTES)


def admit_rank(end: socket.socket, secret: bytes) -> int:
    """Verify that a rank has the key, prove the same to it, and return its number."""
    challenge = os.urandom(_NONCE_BYTES)
    end.sendall(challenge)
    answer = _read_messages(end, _RANK_BYTES + _NONCE_BYTES + _MAC_BYTES)
    said, mac = answer[:-_MAC_BYTES], answer[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, b"rank", challenge + said)):
        raise NotTheOther("it does not have the key of this notebook")
    end.sendall(_mac(secret, b"notebook", said + challenge))
    return int.from_bytes(said[:_RANK_BYTES], "big")


def introduce_rank(end: socket.socket, secret: bytes, rank: int) -> None:
    """Prove to the notebook that this rank has the key, and verify the notebook."""
    challenge = _read_messages(end, _NONCE_BYTES)
    said = rank.to_bytes(_RANK_BYTES, "big") + os.urandom(_NONCE_BYTES)
    end.sendall(said + _mac(secret, b"rank", challenge + said))
    proof = _read_messages(end, _MAC_BYTES)
    if not hmac.compare_digest(proof, _mac(secret, b"notebook", said + challenge)):
        raise NotTheOther("the listener is not the notebook that started this rank")


def _mac(secret: bytes, who: bytes, said: bytes) -> bytes:
    # The sender's role is part of the proof, so that it cannot be reflected.
    return hmac.digest(secret, who + said, hashlib.sha256)


def _read_messages(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = end.recv(size - len(data))
        if not piece:
            raise NotTheOther("it closed the connection before authentication")
        data += piece
    return data
