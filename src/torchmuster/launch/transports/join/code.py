"""The join code: what a machine needs to find the host of a run, verify it, and join.

It holds the host's addresses and port, the secret of the run, and the fingerprint of the certificate that the
host made for this run. One code serves all machines of a run. It is printed and pasted, never stored.
"""

import base64
import binascii
import hashlib
import hmac
import ipaddress
from typing import Annotated

import msgspec

from torchmuster.errors import Impossible

SECRET_BYTES = 16
FINGERPRINT_BYTES = 16
MOST_ADDRESSES = 3
MOST_PLACES = 2**16

_KEY_SALT = b"torchmuster join secret"
_KEY_BYTES = 32

_Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
_Fingerprint = Annotated[
    bytes, msgspec.Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)
]
_PackedAddress = Annotated[bytes, msgspec.Meta(min_length=4, max_length=16)]


class JoinCode(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a join code. Nodes that look the host up by its DNS name need no addresses."""

    secret: bytes
    fingerprint: bytes  # the first bytes of the SHA-256 of the host's certificate
    port: int
    addresses: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"JoinCode(addresses={self.addresses}, port={self.port})"  # without the secret


class _PackedCode(msgspec.Struct, frozen=True, array_like=True):
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    addresses: Annotated[list[_PackedAddress], msgspec.Meta(min_length=1)]
    secret: _Secret
    fingerprint: _Fingerprint


def encode_code(code: JoinCode) -> str:
    """Return a code as one word of letters, digits, ``-`` and ``_``."""
    packed = _PackedCode(
        code.port,
        [ipaddress.ip_address(address).packed for address in code.addresses],
        code.secret,
        code.fingerprint,
    )
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(packed)).decode().rstrip("=")


def decode_code(text: str) -> JoinCode:
    """Decode a pasted code; raises Impossible if it is not one."""
    word = "".join(text.split())
    try:
        data = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
        packed = msgspec.msgpack.decode(data, type=_PackedCode)
        addresses = tuple(str(ipaddress.ip_address(address)) for address in packed.addresses)
    except (binascii.Error, msgspec.MsgspecError, ValueError) as error:
        raise Impossible(
            "this is not a join code",
            why="it is incomplete or was changed; nothing was sent",
            fix="copy and paste the whole line that muster run --join printed",
        ) from error
    return JoinCode(
        secret=packed.secret,
        fingerprint=packed.fingerprint,
        port=packed.port,
        addresses=addresses,
    )


def addresses_for_code(addresses: list[str]) -> tuple[str, ...]:
    """Return the addresses of this host that other machines can use, best first, as many as a code holds."""
    useful = []
    for address in addresses:
        parsed = ipaddress.ip_address(address)
        if not parsed.is_link_local and not parsed.is_loopback:
            useful.append(address)
    return tuple((useful or addresses)[:MOST_ADDRESSES])


def key_from(text: str) -> bytes:
    """Return the key of a text that all nodes of a run have.

    Deliberately slow: any client that connects sees a certificate that is derived from the text, and can try to
    guess the text.
    """
    return hashlib.scrypt(text.encode(), salt=_KEY_SALT, n=2**14, r=8, p=1, dklen=_KEY_BYTES)


def join_secret(key: bytes) -> bytes:
    """Return the secret of the join code of nodes that share a key."""
    return hmac.digest(key, b"torchmuster join", "sha256")[:SECRET_BYTES]


def certificate_seed(key: bytes) -> bytes:
    """Return the seed of the host's certificate for nodes that share a key."""
    return hmac.digest(key, b"torchmuster certificate", "sha256")
