"""What is asked of a machine and what it answers, as JSON: serving, calling, closing."""

from typing import Any, TypeVar

import msgspec

from torchmuster.diagnose.links.datagrams import MOST_FRAME_BYTES
from torchmuster.diagnose.links.model import USUAL_PORTS, Figures
from torchmuster.errors import MusterError
from torchmuster.launch import protocol

_Asked = TypeVar("_Asked", bound=msgspec.Struct)


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    """Open ports for the others. ``port`` is as in ``--port`` and opened only if ``meeting``."""

    nonce: str
    address: str | None = None
    meeting: bool = False
    port: int | None = None
    for_s: float = 120.0


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine says of an interface; one that is up may still have no cable."""

    name: str
    up: bool
    connected: bool
    mtu_bytes: int | None
    speed_mbits: int | None
    networks: tuple[str, ...]  # of each of its addresses: 10.0.0.1/24

    @property
    def frame_bytes(self) -> int | None:
        """The biggest frame that can be tried through it."""
        return None if self.mtu_bytes is None else min(self.mtu_bytes, MOST_FRAME_BYTES)


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What is open now. ``udp_ports`` are by address; the meeting port is None if it is not open."""

    port: int
    addresses: tuple[protocol.Address, ...]
    udp_ports: dict[str, int]
    interfaces: tuple[Interface, ...]
    given_out_ports: tuple[int, int] = USUAL_PORTS
    meeting_port: int | None = None
    meeting_reason: str = ""
    meeting_trouble: protocol.Trouble | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to call. ``frame_bytes`` is the biggest frame that it sends itself."""

    address: str
    port: int
    udp_port: int | None = None
    frame_bytes: int | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Call these: all at once to see who is reached, or one after the other to measure."""

    nonce: str
    targets: tuple[Target, ...]
    timeout_s: float = 5.0
    measure: bool = False
    datagrams: int = 200


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How one call went; ``there`` and ``back`` are what was measured of the two directions."""

    problem: str
    seconds: float
    local: protocol.Address | None = None
    there: Figures | None = None
    back: Figures | None = None


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """How the calls went, in the order of the targets."""

    results: tuple[Result, ...]


def read_message(kind: type[_Asked], argument: Any) -> _Asked:
    """Return what JSON says as one of these; raises ``MusterError`` if it is not that."""
    try:
        return msgspec.convert(argument, kind)
    except msgspec.ValidationError as error:
        raise MusterError(f"not {kind.__name__}: {error}") from error


def encode_message(message: msgspec.Struct) -> Any:
    """Return a message as plain JSON types."""
    return msgspec.to_builtins(message)
