"""Checkpoints in object storage (S3 and compatible services), through fsspec.

A file is uploaded in parts and appears when the upload is completed, or never. Each client finds
its credentials and the address of the service in its usual places: for S3 the ``AWS_*`` variables
and ``~/.aws``.
"""

import contextlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.core import url_to_fs

from torchmuster.checkpoints.store import MARKER, checked_file, checked_name, names_in_order
from torchmuster.errors import MusterError
from torchmuster.redaction import redact_text

# Part size: S3 allows 10,000 parts, and a part is in memory while it is sent.
_PART_BYTES = 32 * 2**20
_READ_AHEAD_BYTES = 4 * 2**20


class ObjectStore:
    """Implements :class:`~torchmuster.checkpoints.store.Store` over an fsspec file system."""

    def __init__(self, storage: fsspec.AbstractFileSystem, root: str) -> None:
        self._storage = storage
        self._root = root.rstrip("/")

    @classmethod
    def at(cls, url: str) -> "ObjectStore":
        """Open a URL; ImportError or ValueError if its protocol is not supported here."""
        # No caching: files of other processes must be visible.
        return cls(*url_to_fs(url, use_listings_cache=False))

    @property
    def where(self) -> str:
        """The URL."""
        return redact_text(self._storage.unstrip_protocol(self._root))

    def names(self) -> list[str]:
        """Return every checkpoint, including unfinished ones, in the order of their steps."""
        return names_in_order([one.rsplit("/", 1)[-1] for one in self._listed(self._root)])

    @contextmanager
    def create(self, name: str, file: str) -> Iterator[BinaryIO]:
        """Upload a file, which appears when the upload is complete."""
        path = self._path(name, file)
        with self._in_words(writing=True):
            # Without autocommit this code completes the upload; else closing does, also after an
            # error.
            upload = self._storage.open(path, "wb", block_size=_PART_BYTES, autocommit=False)
        stream = _Stream(upload, self)
        try:
            yield cast(BinaryIO, stream)
            with self._in_words(writing=True):
                upload.close()
                upload.commit()
        except BaseException:
            with contextlib.suppress(Exception):  # report the first error
                upload.discard()
            with contextlib.suppress(AttributeError):
                upload.closed = True  # or garbage collection would upload it
            raise

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file to read and seek in; FileNotFoundError if it does not exist."""
        path = self._path(name, file)
        with self._in_words():
            return cast(
                BinaryIO,
                _Stream(
                    self._storage.open(
                        path, "rb", block_size=_READ_AHEAD_BYTES, cache_type="readahead"
                    ),
                    self,
                ),
            )

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file; empty if the checkpoint does not exist."""
        folder = self._path(name)
        found = self._found(folder).items()
        return {path[len(folder) + 1 :]: int(info["size"] or 0) for path, info in found}

    def size(self, name: str, file: str) -> int | None:
        """Return the size of one file in bytes; None if it does not exist."""
        try:
            with self._in_words():
                return int(self._storage.info(self._path(name, file))["size"] or 0)
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its marker first."""
        paths = [self._path(name, MARKER), *self._found(self._path(name))]
        for path in dict.fromkeys(paths):
            with contextlib.suppress(FileNotFoundError), self._in_words():
                self._storage.rm_file(path)

    def free_bytes(self) -> int | None:
        """None: object storage has no size limit."""
        return None

    def checked_on_arrival(self) -> bool:
        """Whether the service verifies uploads: S3 rejects a part that does not match its checksum.

        False if checksums are disabled, or the client's version does not support them.
        """
        protocol = self._storage.protocol
        if "s3" not in ((protocol,) if isinstance(protocol, str) else protocol):
            return False
        with self._in_words():
            config = self._storage.s3.meta.config
        return getattr(config, "request_checksum_calculation", None) == "when_supported"

    def _found(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return all files of a checkpoint, with those in sub-folders."""
        try:
            with self._in_words():
                found = self._storage.find(folder, detail=True)
        except FileNotFoundError:
            return {}
        return {path: info for path, info in found.items() if path.startswith(f"{folder}/")}

    def _listed(self, path: str) -> dict[str, dict[str, Any]]:
        try:
            with self._in_words():
                entries = self._storage.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return {one["name"]: one for one in entries if one["name"].rstrip("/") != path}

    def _path(self, name: str, file: str = "") -> str:
        path = f"{self._root}/{checked_name(name)}"
        return f"{path}/{checked_file(file)}" if file else path

    @contextmanager
    def _in_words(self, *, writing: bool = False) -> Iterator[None]:
        """Convert the clients' various errors to one; a missing file stays FileNotFoundError."""
        try:
            yield
        except MusterError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not writing:  # else it is the bucket
                raise
            raise MusterError(
                f"cannot access {self.where}",
                why=redact_text(f"{type(error).__name__}: {error}"),
                fix="check the address, the credentials, and that the service is up (S3: AWS_ENDPOINT_URL)",
            ) from error


class _Stream(io.RawIOBase):
    """An fsspec file whose errors are converted to the store's."""

    def __init__(self, inner: Any, store: ObjectStore) -> None:
        self._inner = inner
        self._store = store

    def readable(self) -> bool:
        return bool(self._inner.readable())

    def writable(self) -> bool:
        return bool(self._inner.writable())

    def seekable(self) -> bool:
        return self.readable()

    def readinto(self, buffer: Any) -> int:
        with self._store._in_words():
            piece = self._inner.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def readall(self) -> bytes:
        with self._store._in_words():
            return bytes(self._inner.read())

    def write(self, piece: Any) -> int:
        with self._store._in_words(writing=True):
            return int(self._inner.write(piece))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._inner.seek(offset, whence))

    def tell(self) -> int:
        return int(self._inner.tell())

    def close(self) -> None:
        if not self.closed and self.readable():
            self._inner.close()  # an upload is closed when it is completed
        super().close()
