"""The join code: everything that a machine needs to find the host, verify it, and join.

Users paste or type a code on another machine. It contains the host's addresses and port, the place in
rank order, a token that is valid once for one machine, and the fingerprint of the host's certificate. It
is written in groups of Crockford base-32 characters; case, blanks and dashes do not matter, and a
checksum detects typing errors before anything is sent.

The bytes: 1 for version, number and kinds of the addresses; 2 for the place; 2 for the port and 4 or 16
for each address (omitted in the short form); 16 for the token; 16 for the fingerprint; 2 for a CRC-16,
which detects every wrong letter and every transposition of two letters.
"""

import binascii
import ipaddress
from dataclasses import dataclass, field, replace

from torchmuster.errors import Impossible

VERSION = 1
MOST_ADDRESSES = 3
MOST_PLACES = 2**16
TOKEN_BYTES = 16
FINGERPRINT_BYTES = 16

# Crockford's base 32: no I, L, O and U. Typed I, L and O are read as 1, 1 and 0.
_LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES = {letter: value for value, letter in enumerate(_LETTERS)}
_READ_AS = str.maketrans({"I": "1", "L": "1", "O": "0", "-": "", "–": "", "—": "", "‑": ""})
_GROUP = 6
_CHECK_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class JoinCode:
    """The content of a join code. Without addresses and port, the host is discovered on the local network."""

    place: int
    token: bytes = field(repr=False)
    fingerprint: bytes  # the first bytes of the SHA-256 of the host's certificate
    port: int = 0
    addresses: tuple[str, ...] = ()

    def short(self) -> "JoinCode":
        """Return the code without addresses, for machines on one local network."""
        return replace(self, port=0, addresses=())


def encode_code(code: JoinCode) -> str:
    """Write a code as text, in groups: ``04002E-…``."""
    packed = [ipaddress.ip_address(address).packed for address in code.addresses]
    if len(packed) > MOST_ADDRESSES:
        raise ValueError(f"a code holds at most {MOST_ADDRESSES} addresses, not {len(packed)}")
    kinds = sum((len(address) == 16) << number for number, address in enumerate(packed))
    data = bytes([VERSION << 5 | len(packed) << 3 | kinds]) + code.place.to_bytes(2, "big")
    if packed:
        data += code.port.to_bytes(2, "big") + b"".join(packed)
    data += code.token + code.fingerprint
    letters = _to_letters(data + _check_code(data))
    return "-".join(letters[start : start + _GROUP] for start in range(0, len(letters), _GROUP))


def decode_code(text: str) -> JoinCode:
    """Decode a typed or pasted code; raises Impossible if it is not valid."""
    letters = "".join(text.split()).upper().translate(_READ_AS)
    if not letters:
        raise Impossible(
            "the join code is empty", fix="paste the whole line that muster host printed"
        )
    strange = sorted(set(letters) - _VALUES.keys())
    if strange:
        raise _mistyped(f"{strange[0]!r} does not occur in join codes")
    if len(letters) < 2:
        raise _cut_off(len(letters), None)
    first = _VALUES[letters[0]] << 3 | _VALUES[letters[1]] >> 2
    expected = _length(first)
    version = first >> 5
    # Verify the checksum first: an error in the first letters would look like another version.
    if len(letters) == expected and version == VERSION:
        data = _from_letters(letters)
        if data is not None and _check_code(data[:-_CHECK_BYTES]) == data[-_CHECK_BYTES:]:
            return _from_bytes(data)
    elif version != VERSION and _is_whole(letters):
        raise Impossible(
            f"this join code has version {version}, but this torchmuster supports version {VERSION}",
            why="the host has a different torchmuster version",
            fix="install the same torchmuster version on both machines; muster --version prints it",
        )
    elif len(letters) < expected:
        raise _cut_off(len(letters), expected)
    raise _mistyped("its checksum does not match")


def _length(first: int) -> int:
    """Return the number of letters of a code that begins with this byte."""
    number, kinds = first >> 3 & 0b11, first & 0b111
    size = 3 + TOKEN_BYTES + FINGERPRINT_BYTES + _CHECK_BYTES
    if number:
        size += 2 + sum(16 if kinds >> one & 1 else 4 for one in range(number))
    return -(-size * 8 // 5)


def _is_whole(letters: str) -> bool:
    data = _from_letters(letters)
    return data is not None and _check_code(data[:-_CHECK_BYTES]) == data[-_CHECK_BYTES:]


def _check_code(data: bytes) -> bytes:
    return binascii.crc_hqx(data, 0xFFFF).to_bytes(_CHECK_BYTES, "big")


def _to_letters(data: bytes) -> str:
    bits = len(data) * 8
    number = int.from_bytes(data, "big") << (-bits % 5)
    count = -(-bits // 5)
    return "".join(_LETTERS[number >> 5 * place & 31] for place in reversed(range(count)))


def _from_letters(letters: str) -> bytes | None:
    """Return the bytes, or None if the padding bits of the last letter are not zero."""
    number = 0
    for letter in letters:
        number = number << 5 | _VALUES[letter]
    spare = len(letters) * 5 % 8
    if number & (1 << spare) - 1:
        return None
    return (number >> spare).to_bytes(len(letters) * 5 // 8, "big")


def _from_bytes(data: bytes) -> JoinCode:
    number, kinds = data[0] >> 3 & 0b11, data[0] & 0b111
    place, rest = int.from_bytes(data[1:3], "big"), data[3:]
    port, addresses = 0, []
    if number:
        port, rest = int.from_bytes(rest[:2], "big"), rest[2:]
        for one in range(number):
            size = 16 if kinds >> one & 1 else 4
            addresses.append(str(ipaddress.ip_address(rest[:size])))
            rest = rest[size:]
    return JoinCode(
        place=place,
        port=port,
        addresses=tuple(addresses),
        token=rest[:TOKEN_BYTES],
        fingerprint=rest[TOKEN_BYTES : TOKEN_BYTES + FINGERPRINT_BYTES],
    )


def _mistyped(why: str) -> Impossible:
    return Impossible(
        "this join code contains a typing error",
        why=f"{why}; nothing was sent",
        fix="copy and paste the whole code that muster host printed",
    )


def _cut_off(have: int, expected: int | None) -> Impossible:
    of = "" if expected is None else f" of {expected}"
    return Impossible(
        "this join code is incomplete",
        why=f"it has {have}{of} letters; nothing was sent",
        fix="copy and paste the whole code that muster host printed",
    )
