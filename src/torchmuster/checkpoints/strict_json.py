"""JSON that somebody else may have written."""

from typing import TypeVar

import msgspec

from torchmuster.redaction import harmless

T = TypeVar("T")


def decode(text: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Read JSON of exactly this type; ValueError says what is wrong with it."""
    try:
        return msgspec.json.decode(text, type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(harmless(str(error))) from None
