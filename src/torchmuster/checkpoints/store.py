"""The ``Store`` protocol: the operations that a folder and object storage have in common.

Names of checkpoints and files also come from disk, so every store validates them here:
a manifest cannot name a file elsewhere.
"""

import re
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol, TypeVar

import msgspec

from torchmuster.errors import Impossible
from torchmuster.redaction import harmless

# Written last: a folder without it is not a checkpoint.
MARKER = "manifest.json"
# A file that is being written has a name that begins with a dot, which no checkpoint file can have.
# Files of many ranks are in sub-folders (rank_file of tensor_file.py).
_FILE = re.compile(r"(?:ranks-[0-9]{5,7}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FOLDER = re.compile(r"ranks-[0-9]{5,7}")
_CHECKPOINT = re.compile(r"step-(\d{8,15})-[0-9a-f]{4,16}")
_PIECE_BYTES = 2**20


class Store(Protocol):
    """A location of checkpoints. Its methods raise OSError or MusterError on failure."""

    @property
    def where(self) -> str:
        """The folder or URL, for display."""

    def names(self) -> list[str]:
        """Return every checkpoint, including unfinished ones, in the order of their steps."""

    def create(self, name: str, file: str) -> AbstractContextManager[BinaryIO]:
        """Write a file: complete and durable after the block, or absent if the block raises."""

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file to read and seek in; FileNotFoundError if it does not exist."""

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file; empty if the checkpoint does not exist.

        It lists the whole checkpoint, so only one process may call it; see :meth:`size`.
        """

    def size(self, name: str, file: str) -> int | None:
        """Return the size of one file in bytes; None if it does not exist."""

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its marker first, so that a partial one never counts as complete."""

    def free_bytes(self) -> int | None:
        """Return the free space; None if unlimited, as in object storage."""

    def checked_on_arrival(self) -> bool:
        """Whether the service itself verifies uploads against a checksum."""


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name; None if the name is invalid."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


def checked_name(name: str) -> str:
    """Return a checkpoint's name if it is valid, so that it is safe in a path."""
    if step_of(name) is None:
        raise Impossible(
            f"{harmless(name)!r} is not a checkpoint name",
            why="checkpoint names have the form step-<number>-<4 hexadecimal digits>",
            fix="muster checkpoint ls shows the names",
        )
    return name


def is_file_name(file: str) -> bool:
    """Return whether this is a valid checkpoint file: a plain name, or one in a folder of ranks."""
    return _FILE.fullmatch(file) is not None


def is_folder_name(folder: str) -> bool:
    """Return whether this is a sub-folder with the files of some ranks."""
    return _FOLDER.fullmatch(folder) is not None


def checked_file(file: str) -> str:
    """Return the name of a checkpoint file if it is valid, so that it is safe in a path."""
    if not is_file_name(file):
        raise Impossible(
            f"{harmless(file)!r} is not a valid checkpoint file name",
            why="file names have letters, digits, dots, dashes and underscores; the only folders are "
            "ranks-<number>",
        )
    return file


def names_in_order(names: list[str]) -> list[str]:
    """Return the valid checkpoint names, in the order of their steps."""
    steps = {one: step_of(one) for one in names}
    return sorted(
        (one for one in names if steps[one] is not None), key=lambda one: (steps[one], one)
    )


def read_small(store: Store, name: str, file: str, *, most_bytes: int) -> bytes:
    """Read a whole small file; ValueError if it is larger than the limit."""
    content = bytearray()
    with store.open(name, file) as stream:
        while piece := stream.read(_PIECE_BYTES):  # in pieces: one read would allocate the maximum
            content += piece
            refuse_too_large(file, len(content), most_bytes=most_bytes)
    return bytes(content)


def refuse_too_large(file: str, size_bytes: int, *, most_bytes: int) -> None:
    """Raise ValueError for a file above the limit: before it is read, and before it is written."""
    if size_bytes > most_bytes:
        raise ValueError(f"{file} is larger than {most_bytes} bytes")


T = TypeVar("T")


def decode_strictly(text: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Parse JSON of exactly this type; ValueError describes the error."""
    try:
        return msgspec.json.decode(text, type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(harmless(str(error))) from None
