"""Text and JSON Lines files as a source, including compressed and remote files.

The files of an epoch, in its order, form one sequence of bytes, and each lane is an equal
part of it. A sample belongs to the lane in which its line begins. A compressed file cannot be read
from the middle: all its samples belong to the lane in which the file begins.
"""

import contextlib
import gzip
import hashlib
import io
import json
import lzma
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
from fsspec.utils import infer_compression

from torchmuster.errors import Impossible, MusterError
from torchmuster.redaction import redact_text
from torchmuster.train.data.streams.iterable import LANES
from torchmuster.train.data.streams.reading import Cursor
from torchmuster.train.seeds import derive_seed

RECORDS = (".txt", ".jsonl", ".ndjson", ".json")
TABLES = (".parquet", ".csv")  # read as datasets: see text.py


@dataclass(frozen=True, kw_only=True)
class File:
    """A data file."""

    place: str  # with its protocol, ready to open
    size_bytes: int
    version: str = ""  # changes if the file does: its modification time, or what its storage has

    @property
    def shown(self) -> str:
        """The address for display: without a password."""
        return redact_text(self.place.removeprefix("file://"))

    @property
    def compression(self) -> str | None:
        """The compression, by the file name; None if uncompressed."""
        return infer_compression(self.place)  # type: ignore[no-any-return]

    @property
    def is_table(self) -> bool:
        """Whether the file is a table, which lines cannot be read from."""
        return _suffix(self.place) in TABLES

    @property
    def is_text(self) -> bool:
        """Whether each line is plain text, not JSON."""
        return _suffix(self.place) == ".txt"


def _suffix(place: str) -> str:
    name = place.rsplit("/", 1)[-1].lower()
    if infer_compression(name) is not None:
        name = name.rsplit(".", 1)[0]
    return f".{name.rsplit('.', 1)[-1]}" if "." in name else ""


def find_files(places: str | Sequence[str], options: Mapping[str, Any]) -> list[File]:
    """Return the files at these paths, patterns, folders or addresses, sorted and unique."""
    wanted = [places] if isinstance(places, str) else list(places)
    found: dict[str, File] = {}
    for place in wanted:
        some = _found_at(place, options)
        if not some:
            raise _nothing_at(place)
        found.update((one.place, one) for one in some)
    files = [found[place] for place in sorted(found)]
    strange = [one.shown for one in files if _suffix(one.place) not in RECORDS + TABLES]
    if strange:
        raise Impossible(
            f"{strange[0]}: unsupported file type",
            why=f"supported types are {', '.join(TABLES + RECORDS)}; the last "
            f"{len(RECORDS)} also compressed (.gz, .bz2, .xz, .zst)",
            fix="use a narrower pattern, such as data/*.jsonl; or write your own dataset",
        )
    if len({one.is_table for one in files}) > 1:
        raise Impossible(
            "tables and files of lines cannot be mixed",
            why=f"the files include {files[0].shown} and {files[-1].shown}",
            fix="use a narrower pattern, such as data/*.parquet",
        )
    for one in files:
        if one.compression == "zstd" and not _can_read_zstd():
            raise Impossible(
                f"{one.shown}: cannot read a file compressed with zstd",
                why="the package zstandard is not installed",
                fix="pip install zstandard",
            )
    return files


def _can_read_zstd() -> bool:
    from fsspec.compression import compr

    return "zstd" in compr


def _found_at(place: str, options: Mapping[str, Any]) -> list[File]:
    try:
        storage, path = fsspec.core.url_to_fs(place, **options)
    except (ImportError, ValueError) as error:
        raise _unknown_storage(place, error) from None
    try:
        if any(sign in path for sign in "*?["):
            paths = storage.glob(path)
        elif storage.isdir(path):
            paths = [one for one in storage.find(path) if _suffix(one) in RECORDS + TABLES]
        else:
            paths = [path] if storage.exists(path) else []
        infos = [storage.info(one) for one in paths]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Impossible(
            f"cannot list {redact_text(place)}",
            why=redact_text(f"{type(error).__name__}: {error}"),
            fix="check the address, and that this host may read it",
        ) from None
    return [
        File(
            place=storage.unstrip_protocol(one["name"]),
            size_bytes=int(one["size"] or 0),
            version=str(one.get("ETag") or one.get("mtime") or one.get("LastModified") or ""),
        )
        for one in infos
        if one["type"] == "file"
    ]


def _unknown_storage(place: str, error: Exception) -> Impossible:
    protocol = place.split("://", 1)[0]
    fix = "pip install 'torchmuster[s3]'" if protocol in ("s3", "s3a") else ""
    return Impossible(
        f"cannot read files at {protocol}://",
        why=redact_text(str(error)),
        fix=fix or "install the package that fsspec names for it",
    )


def _nothing_at(place: str) -> Impossible:
    return Impossible(
        f"no files at {redact_text(place)}",
        why=f"searched for {', '.join(RECORDS + TABLES)} files, including compressed ones",
        fix="check the path; quote a pattern such as data/*.jsonl",
    )


def file_digest(files: Sequence[File]) -> str:
    """Return a short digest that changes if a file is added, removed or of another size."""
    names = "\n".join(f"{one.size_bytes} {one.place}" for one in files)
    return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()


_CHUNK_BYTES = 1 << 20  # read at once from object storage, for each lane
_TRIES = 5
_FIRST_PAUSE_S = 0.5  # doubled after each failure
# Errors of the file or its permissions, for which a retry does not help.
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError)
_BROKEN_ARCHIVE = (EOFError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The lines of a file that begin from ``begin`` up to ``end`` (bytes); all of a compressed file."""

    file: File
    begin: int
    end: int


def parts_of_shard(files: Sequence[File], lane: int, lanes: int) -> list[Part]:
    """Return the parts of files that form a lane."""
    total = sum(file.size_bytes for file in files)
    begin, end = total * lane // lanes, total * (lane + 1) // lanes
    parts = []
    start = 0  # of the file, in the sequence of all files
    for file in files:
        if file.compression is not None:
            if begin <= start < end:
                parts.append(Part(file=file, begin=0, end=file.size_bytes))
        elif start < end and begin < start + file.size_bytes:
            parts.append(
                Part(
                    file=file,
                    begin=max(begin - start, 0),
                    end=min(end - start, file.size_bytes),
                )
            )
        start += file.size_bytes
    return parts


class Files:
    """Lines of files: text for ``.txt``, JSON values for ``.jsonl``. Empty lines are skipped.

    ``places`` are paths, patterns, folders, or addresses such as ``s3://bucket/part-*.jsonl.gz``, with
    ``storage_options`` for fsspec. ``shuffle`` gives the files another order in each epoch.
    """

    def __init__(
        self,
        places: str | Sequence[str],
        *,
        lanes: int = LANES,
        seed: int = 0,
        shuffle: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = dict(storage_options or {})
        self._files = find_files(places, self._options)
        if self._files[0].is_table:
            raise Impossible(
                f"{self._files[0].shown} is a table, which is not read line by line",
                fix="open it with the package datasets: datasets.load_dataset",
            )
        self._lanes = lanes
        self._seed = seed
        self._shuffle = shuffle

    def lanes(self) -> int:
        """Return the number of lanes."""
        return self._lanes

    def identity(self) -> str:
        """Return the number of files and a digest of their names and sizes."""
        order = f"shuffled by {self._seed}" if self._shuffle else "sorted"
        return f"{len(self._files)} files, {order}, digest {file_digest(self._files)}"

    def open(
        self, lanes: Sequence[int], *, epoch: int, cursors: Mapping[int, Cursor | None]
    ) -> dict[int, "_FileShardReader"]:
        """Open lanes; each file is opened when it is needed."""
        files = list(self._files)
        if self._shuffle:
            random.Random(derive_seed(self._seed, "files", epoch)).shuffle(files)
        return {
            lane: _FileShardReader(
                parts_of_shard(files, lane, self._lanes), self._options, cursors.get(lane)
            )
            for lane in lanes
        }


class _FileShardReader:
    def __init__(
        self, parts: list[Part], options: Mapping[str, Any], cursor: Sequence[int] | None
    ) -> None:
        self._parts = parts
        self._options = options
        self._place, at = cursor or (0, None)
        self._at: int | None = at  # within the part; None at its beginning
        self._lines: LinesOfPart | None = None

    def read(self, count: int) -> list[Any]:
        samples: list[Any] = []
        while len(samples) < count and self._place < len(self._parts):
            if self._lines is None:
                self._lines = LinesOfPart(self._parts[self._place], self._options, self._at)
            line = self._lines.read()
            if line is None:
                self.close()
                self._place, self._at = self._place + 1, None
            elif line.strip():
                samples.append(self._lines.sample(line))
        if self._lines is not None:
            self._at = self._lines.at
        return samples

    def cursor(self) -> Cursor:
        return [self._place, self._at]

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


class LinesOfPart:
    """The lines of a part, with retries for remote files.

    ``at`` is the byte at which the next line begins; in a compressed file, a byte of the
    decompressed content.
    """

    def __init__(self, part: Part, options: Mapping[str, Any], at: int | None) -> None:
        self._part = part
        self._options = options
        self._file: BinaryIO | None = None
        self._stack = contextlib.ExitStack()
        self.at = part.begin if at is None else at
        if at is None and part.begin > 0:
            self.at -= 1  # skip the line that begins before this part, unless one ends right here
            self.read(beyond=True)

    def read(self, *, beyond: bool = False) -> bytes | None:
        """Return the next line; None at the end of the part."""
        if not beyond and self._part.file.compression is None and self.at >= self._part.end:
            return None
        line = self._retried(self._next_line)
        self.at += len(line)
        return line or None

    def _next_line(self) -> bytes:
        if self._file is None:
            self._file = self._stack.enter_context(open_file(self._part.file, self._options))
            if self.at:
                self._file.seek(self.at)
        return self._file.readline()

    def _retried(self, act: Callable[[], bytes]) -> bytes:
        pause_s = _FIRST_PAUSE_S
        for tried in range(1, _TRIES + 1):
            try:
                return act()
            except Exception as error:  # each kind of storage has its own errors
                self.close()
                if _is_of_archive(error):
                    raise self._broken(error) from None
                if isinstance(error, _LASTING) or tried == _TRIES:
                    raise self._unreadable(error, tried) from None
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("unreachable")

    def sample(self, line: bytes) -> Any:
        """Return the value of a line that was just read."""
        try:
            text = line.decode()
            return text.rstrip("\r\n") if self._part.file.is_text else json.loads(text)
        except (ValueError, RecursionError) as error:
            kind = "text in UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
            number = self._line_number(self.at - len(line))
            cut = (
                ", and it is the last line: the file may be truncated" if line[-1:] != b"\n" else ""
            )
            raise MusterError(
                f"{self._part.file.shown}: line {number} is not {kind}",
                why=f"{error}{cut}",
                fix="fix or remove that line; each line holds one complete JSON value"
                if kind == "JSON"
                else "fix or remove that line, or rewrite the file as UTF-8",
            ) from None

    def _line_number(self, at: int) -> int:
        """Count lines from the beginning of the file, only for an error message."""
        number, left = 1, at
        with open_file(self._part.file, self._options) as file:
            while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
                number += chunk.count(b"\n")
                left -= len(chunk)
        return number

    def _broken(self, error: Exception) -> MusterError:
        return MusterError(
            f"{self._part.file.shown}: the compressed file is damaged after byte {self.at}",
            why=f"{type(error).__name__}: {error}",
            fix="copy or download the file again; it is probably truncated",
        )

    def _unreadable(self, error: Exception, tried: int) -> MusterError:
        times = "" if tried == 1 else f" (tried {tried} times)"
        return MusterError(
            f"cannot read {self._part.file.shown}{times}",
            why=redact_text(f"{type(error).__name__}: {error}"),
            fix="check that the file still exists and that this host may read it",
        )

    def close(self) -> None:
        """Close the file; it is opened again if needed."""
        self._file = None
        self._stack.close()


def _is_of_archive(error: Exception) -> bool:
    """Return whether an error means damage: gzip and bzip2 raise OSErrors without an errno."""
    if isinstance(error, OSError):
        return error.errno is None and type(error) in (OSError, gzip.BadGzipFile)
    return isinstance(error, _BROKEN_ARCHIVE)


@contextlib.contextmanager
def open_file(file: File, options: Mapping[str, Any]) -> Iterator[BinaryIO]:
    """Open a file to read bytes, decompressed according to its name."""
    with contextlib.ExitStack() as stack:
        storage, path = fsspec.core.url_to_fs(file.place, **options)
        local = "file" in storage.protocol
        raw = stack.enter_context(storage.open(path, "rb", block_size=_CHUNK_BYTES))
        if file.compression is not None:
            from fsspec.compression import compr

            raw = stack.enter_context(compr[file.compression](raw, mode="rb"))
        # readline() of a remote file is slow Python code; a buffer has a fast one.
        yield raw if local and file.compression is None else io.BufferedReader(raw)
