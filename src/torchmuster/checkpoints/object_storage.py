"""Checkpoints in object storage (S3 and compatible services), through fsspec.

A file is uploaded in parts and appears when the upload is completed, or never. Each client finds
its credentials and the address of the service in its usual places: for S3 the ``AWS_*`` variables
and ``~/.aws``.
"""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from fsspec.core import url_to_fs

from torchmuster.checkpoints.store import MARKER, checked_file, checked_name, in_order
from torchmuster.errors import MusterError
from torchmuster.redaction import redact_text


class ObjectStore:
    """Checkpoints in an fsspec file system; the methods are those of FolderStore."""

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
        with self._errors():
            try:
                paths = self._storage.ls(self._root, detail=False)
            except FileNotFoundError:
                paths = []
        return in_order([path.rstrip("/").rsplit("/", 1)[-1] for path in paths])

    def sizes(self, name: str) -> dict[str, int | None]:
        """Return the size of each file; empty if the checkpoint does not exist."""
        prefix = f"{self._path(name)}/"
        with self._errors():
            try:
                files = self._storage.find(prefix, detail=True)
            except FileNotFoundError:
                files = {}
        return {path.removeprefix(prefix): int(info["size"] or 0) for path, info in files.items()}

    def read(self, name: str, file: str, begin: int, end: int) -> bytes:
        """Return a range of a file's bytes; FileNotFoundError if it does not exist."""
        path = self._path(name, file)
        if begin == end:
            return b""  # HTTP has no empty ranges
        with self._errors():
            return bytes(self._storage.cat_file(path, start=begin, end=end))

    def download(self, name: str, file: str, target: Path) -> None:
        """Copy a file to a local path."""
        with self._errors():
            self._storage.get_file(self._path(name, file), str(target))

    def write(self, name: str, file: str, content: bytes) -> None:
        """Upload a small file in one request."""
        with self._errors(writing=True):
            self._storage.pipe_file(self._path(name, file), content)

    def upload(self, name: str, path: Path) -> None:
        """Upload a local file; it appears when the upload is complete."""
        with self._errors(writing=True):
            self._storage.put_file(str(path), self._path(name, path.name))

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its marker first."""
        files = [MARKER, *self.sizes(name)]
        for file in dict.fromkeys(files):
            with contextlib.suppress(FileNotFoundError), self._errors():
                self._storage.rm_file(f"{self._path(name)}/{file}")

    def free_bytes(self) -> int | None:
        """None: object storage has no size limit."""
        return None

    def _path(self, name: str, file: str | None = None) -> str:
        path = f"{self._root}/{checked_name(name)}"
        return path if file is None else f"{path}/{checked_file(file)}"

    @contextmanager
    def _errors(self, *, writing: bool = False) -> Iterator[None]:
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
