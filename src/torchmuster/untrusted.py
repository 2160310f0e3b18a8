"""Read files and text that another process or user wrote, within limits of size, depth and time.

Everything that this process did not just write itself goes through here: run folders, claims, caches, model
folders. A file that is too large, too deeply nested, damaged or not a regular file gives :class:`Unreadable`
(a ``ValueError``) and costs little memory, whatever its size. Text from such files goes to a terminal through
:func:`torchmuster.redaction.harmless`.
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")
# Python objects take up to 24 times the memory of their JSON: "{}," becomes an object of 64 bytes.
MOST_BYTES = 8 * 2**20
MOST_LINE_BYTES = 4 * 2**20
MOST_LINES_BYTES = 32 * 2**20  # of a file of lines that is read at once
MOST_DEPTH = 64
# Do not wait for the writer of a pipe, and do not become the terminal's process.
_OPEN = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_OPEN |= getattr(os, "O_NOCTTY", 0)
# Where the caller's own pipe is: standard input, and what a shell's <(…) becomes.
_OWN_PIPES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


class Unreadable(ValueError):
    """The content is too large, too deeply nested, damaged, or not that of a regular file."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; never wait, as for the writer of a pipe."""
    file = os.open(path, _OPEN)
    try:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode) and not str(path).startswith(_OWN_PIPES):
            raise Unreadable(f"{path} is not a regular file")
        os.set_blocking(file, True)
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_bounded(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file; raise :class:`Unreadable` if it is larger than the limit."""
    with open_regular(path) as stream:
        if os.fstat(stream.fileno()).st_size > most_bytes:
            raise Unreadable(f"{path} is larger than {most_bytes:,} bytes")
        data = stream.read(most_bytes + 1)  # files below /proc have no size; others may grow
    if len(data) > most_bytes:
        raise Unreadable(f"{path} is larger than {most_bytes:,} bytes")
    return data


def parse_json(text: bytes | str) -> Any:
    """Parse JSON of any origin; raise :class:`Unreadable` if it is not JSON or too deeply nested.

    Lone surrogates, which cannot be encoded again, are escaped.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not valid JSON: {error}") from None
    if text.count("[") + text.count("{") > MOST_DEPTH and isinstance(content, dict | list):
        _refuse_depth(content)
    return _encodable(content) if "\\ud" in text or "\\uD" in text else content


def _refuse_depth(content: Any) -> None:
    level = [content]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return
    raise Unreadable(f"nested more than {MOST_DEPTH} levels deep")


def _encodable(content: Any) -> Any:
    if isinstance(content, dict):
        return {_encodable(key): _encodable(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_encodable(item) for item in content]
    if isinstance(content, str):
        return content.encode("utf-8", errors="backslashreplace").decode("utf-8")
    return content


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """Return the content of a JSON file; raise OSError or :class:`Unreadable`."""
    return parse_json(read_bounded(path, most_bytes))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none that can be read."""
    try:
        content = read_json(path)
    except (OSError, Unreadable):
        return {}
    return content if isinstance(content, dict) else {}


def read_typed(path: Path, decode: Callable[[bytes], T], most_bytes: int = MOST_BYTES) -> T:
    """Decode a file, for example with a decoder of msgspec; raise OSError or :class:`Unreadable`.

    Decoders raise more than their own errors: ``RecursionError`` for deep nesting, ``UnicodeDecodeError``.
    """
    data = read_bounded(path, most_bytes)
    try:
        return decode(data)
    except Exception as error:
        raise Unreadable(str(error)) from None


def json_objects(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of the lines; lines that are torn, too long or not an object are skipped."""
    for line in data.split(b"\n"):
        if not line or len(line) > MOST_LINE_BYTES:
            continue
        try:
            content = parse_json(line)
        except Unreadable:  # torn by a crash
            continue
        if isinstance(content, dict):
            yield content


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the first ``MOST_LINES_BYTES`` of a file; nothing if it cannot be read."""
    try:
        with open_regular(path) as stream:
            data = stream.read(MOST_LINES_BYTES)
    except (OSError, Unreadable):
        return
    yield from json_objects(data)
