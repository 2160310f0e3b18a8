"""Requests to a host and its answers, as JSON: serve, call, close."""

from typing import Any, TypeVar

import msgspec

from torchmuster.diagnose.links.model import USUAL_PORTS, Figures
from torchmuster.errors import MusterError
from torchmuster.launch import protocol

Message = TypeVar("Message", bound=msgspec.Struct)


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    """Open ports for other hosts. ``port`` is as in ``--port`` and opened only if ``meeting``."""

    nonce: str
    address: str | None = None
    meeting: bool = False
    port: int | None = None
    for_s: float = 600.0


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """An interface as the host reports it; one that is up may still have no carrier."""

    name: str
    up: bool
    connected: bool
    mtu_bytes: int | None
    speed_mbits: int | None
    networks: tuple[str, ...]  # one per address: 10.0.0.1/24


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The open ports; ``meeting_port`` is None if it is not open."""

    port: int
    addresses: tuple[protocol.Address, ...]
    interfaces: tuple[Interface, ...]
    given_out_ports: tuple[int, int] = USUAL_PORTS
    meeting_port: int | None = None
    meeting_reason: str = ""
    meeting_trouble: protocol.Trouble | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A port of a host to call."""

    address: str
    port: int


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Call these targets: in parallel to test connections, or one after the other to measure."""

    nonce: str
    targets: tuple[Target, ...]
    timeout_s: float = 5.0
    measure: bool = False


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one call; ``there`` and ``back`` are the figures of the two directions."""

    problem: str
    seconds: float
    local: protocol.Address | None = None
    there: Figures | None = None
    back: Figures | None = None


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the calls, in the order of the targets."""

    results: tuple[Result, ...]


def read_message(kind: type[Message], argument: Any) -> Message:
    """Convert JSON to a message of this type; raise ``MusterError`` if it is not one."""
    try:
        return msgspec.convert(argument, kind)
    except msgspec.ValidationError as error:
        raise MusterError(f"not {kind.__name__}: {error}") from error


def encode_message(message: msgspec.Struct) -> Any:
    """Return a message as plain JSON types."""
    return msgspec.to_builtins(message)
