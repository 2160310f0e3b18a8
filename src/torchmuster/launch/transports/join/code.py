"""The join code: what a machine needs to find the host of a run, verify it, and join.

It holds the addresses and the port of the host, the secret of the run, and a pin of the certificate that the host
made for this run. One code serves all machines of a run. It is printed and pasted, never stored.
"""

import base64
import binascii
import hashlib
from typing import Annotated, NamedTuple

import msgspec

from torchmuster.errors import Impossible

SECRET_BYTES = 16
PIN_BYTES = 16
SEED_BYTES = 32
MOST_ADDRESSES = 3
_KEY_SALT = b"torchmuster join secret"

_Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
_Pin = Annotated[bytes, msgspec.Meta(min_length=PIN_BYTES, max_length=PIN_BYTES)]
_IPAddress = Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Fa-f.:]{2,45}\Z")]


class JoinCode(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The content of a join code. Nodes that look the host up by its DNS name need no addresses."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    secret: _Secret
    pin: _Pin  # the first bytes of the SHA-256 of the host's certificate
    addresses: Annotated[tuple[_IPAddress, ...], msgspec.Meta(max_length=MOST_ADDRESSES)] = ()

    def __repr__(self) -> str:
        return f"JoinCode(addresses={self.addresses}, port={self.port})"  # without the secret


class SharedKey(NamedTuple):
    """What nodes with the same text agree on: the secret of the run, and the seed of the host's certificate."""

    secret: bytes
    seed: bytes


def encode_code(code: JoinCode) -> str:
    """Return a code as one word of letters, digits, ``-`` and ``_``."""
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(code)).decode().rstrip("=")


def decode_code(text: str) -> JoinCode:
    """Decode a pasted code; raises Impossible if it is not one."""
    word = "".join(text.split())
    try:
        data = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
        return msgspec.msgpack.decode(data, type=JoinCode)
    except (binascii.Error, msgspec.MsgspecError, ValueError) as error:
        raise Impossible(
            "this is not a join code",
            why="it is incomplete or was changed; nothing was sent",
            fix="copy and paste the whole code that muster run --join printed",
        ) from error


def shared_key(text: str) -> SharedKey:
    """Return the key of a text that all nodes of a run have.

    Deliberately slow: any client that connects sees a certificate that is derived from the text, and can try to
    guess the text.
    """
    length = SECRET_BYTES + SEED_BYTES
    key = hashlib.scrypt(text.encode(), salt=_KEY_SALT, n=2**14, r=8, p=1, dklen=length)
    return SharedKey(secret=key[:SECRET_BYTES], seed=key[SECRET_BYTES:])
