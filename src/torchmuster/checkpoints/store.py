"""Where checkpoints lie: the whole of what a folder and object storage both can do, and no more.

A checkpoint's name and its files' names come from disk as well, so every store has them checked here:
what somebody wrote into a manifest cannot name a file elsewhere.
"""

import re
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol, TypeVar

import msgspec

from torchmuster.errors import Impossible
from torchmuster.redaction import harmless

# Written last: a folder without it is not a checkpoint, whatever else is in it.
MARKER = "manifest.json"
# A file that is being written has a name that begins with a dot, which no file of a checkpoint can have.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CHECKPOINT = re.compile(r"step-(\d{8,15})-[0-9a-f]{4,16}")
_PIECE_BYTES = 2**20


class Store(Protocol):
    """A place with checkpoints. It raises OSError or MusterError where it fails."""

    @property
    def where(self) -> str:
        """The folder or URL, for people."""

    def names(self) -> list[str]:
        """Return every checkpoint that is there, unfinished ones too, in the order of their steps."""

    def create(self, name: str, file: str) -> AbstractContextManager[BinaryIO]:
        """Write a file: it is there, whole and durable, when the block ends well; else nothing is."""

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file to read and seek in; FileNotFoundError if it is not there."""

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file; nothing of a checkpoint that is not there."""

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its marker first, so that no half of it is ever taken for a whole."""

    def free_bytes(self) -> int | None:
        """Return the room that is left; None where there is no end of it, as in object storage."""

    def checked_on_arrival(self) -> bool:
        """Whether the service itself compares what arrived with a checksum of what was sent."""


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name; None if it is not the name of one."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


def checked_name(name: str) -> str:
    """Return a checkpoint's name if it is one, so that it can be put into a path."""
    if step_of(name) is None:
        raise Impossible(
            f"{harmless(name)!r} is not the name of a checkpoint",
            why="such a name is step-<number>-<4 hexadecimal digits>",
            fix="muster checkpoint ls shows the names",
        )
    return name


def is_file_name(file: str) -> bool:
    """Say whether this can be a checkpoint's file: a plain name, without a folder."""
    return _FILE.fullmatch(file) is not None


def checked_file(file: str) -> str:
    """Return the name of a checkpoint's file if it is a plain one, so that it can be put into a path."""
    if not is_file_name(file):
        raise Impossible(
            f"{harmless(file)!r} is not the name of a file of a checkpoint",
            why="such a name has letters, digits, dots, dashes and underscores, and no folder",
        )
    return file


def names_in_order(names: list[str]) -> list[str]:
    """Return those that are names of checkpoints, in the order of their steps."""
    steps = {one: step_of(one) for one in names}
    return sorted(
        (one for one in names if steps[one] is not None), key=lambda one: (steps[one], one)
    )


def read_small(store: Store, name: str, file: str, *, most_bytes: int) -> bytes:
    """Read a whole file that is known to be small; ValueError if it is larger."""
    content = bytearray()
    with store.open(name, file) as stream:
        while piece := stream.read(_PIECE_BYTES):  # not at once: memory would be taken for the most
            content += piece
            if len(content) > most_bytes:
                raise ValueError(f"{file} is larger than {most_bytes} bytes")
    return bytes(content)


T = TypeVar("T")


def decode_strictly(text: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Read JSON of exactly this type; ValueError says what is wrong with it."""
    try:
        return msgspec.json.decode(text, type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(harmless(str(error))) from None
