"""Checkpoints in a folder of a local or shared disk."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torchmuster.checkpoints.store import (
    MARKER,
    checked_file,
    checked_name,
    is_folder_name,
    names_in_order,
)

# Errors of file systems that cannot sync a folder (some shared ones cannot).
_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP)

_TRIES = 10


class FolderStore:
    """Implements :class:`~torchmuster.checkpoints.store.Store` over a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    @property
    def where(self) -> str:
        """The folder."""
        return str(self._folder)

    def names(self) -> list[str]:
        """Return every checkpoint, including unfinished ones, in the order of their steps."""
        try:
            with os.scandir(self._folder) as entries:
                return names_in_order([one.name for one in entries if one.is_dir()])
        except FileNotFoundError:
            return []

    @contextmanager
    def create(self, name: str, file: str) -> Iterator[BinaryIO]:
        """Write a temporary file, sync it to disk, then rename it."""
        path = self._path(name, file)
        self._make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        try:
            with temporary.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
                _forget_cached(stream)
            temporary.replace(path)
            _sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):  # report the first error
                temporary.unlink(missing_ok=True)
            raise

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file to read and seek in; FileNotFoundError if it does not exist."""
        path = self._path(name, file)
        # Opening a pipe would block.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(handle, "rb")

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file; empty if the checkpoint does not exist."""
        return _file_sizes(self._path(name))

    def size(self, name: str, file: str) -> int | None:
        """Return the size of one file in bytes; None if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return self._path(name, file).stat().st_size
        return None

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its marker first; for a link, only the link."""
        folder = self._path(name)
        if folder.is_symlink():
            folder.unlink()
            return
        for _ in range(_TRIES):
            if not folder.exists():
                return
            # Another host may be deleting it too.
            with contextlib.suppress(FileNotFoundError):
                (folder / MARKER).unlink(missing_ok=True)
                _sync_folder(folder)
                shutil.rmtree(folder)

    def free_bytes(self) -> int | None:
        """Return the free space on the disk, for this user."""
        folder = self._folder
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def checked_on_arrival(self) -> bool:
        """False: a disk does not verify what was written; it must be read back."""
        return False

    def _path(self, name: str, file: str = "") -> Path:
        folder = self._folder / checked_name(name)
        return folder / checked_file(file) if file else folder

    def _make_folder(self, folder: Path) -> None:
        """Create a checkpoint's folder or a sub-folder of it, durably."""
        if folder.is_dir():
            return
        if folder.parent != self._folder:
            self._make_folder(folder.parent)
        folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(folder.parent)


def _file_sizes(folder: Path, prefix: str = "") -> dict[str, int]:
    sizes = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, or a dangling link
                if entry.is_file():
                    sizes[prefix + entry.name] = entry.stat().st_size
                elif not prefix and is_folder_name(entry.name) and entry.is_dir():
                    sizes |= _file_sizes(folder / entry.name, f"{entry.name}/")
    return sizes


def _forget_cached(stream: BinaryIO) -> None:
    """Drop the file from the page cache, so that reading it back comes from the disk."""
    with contextlib.suppress(OSError, AttributeError):  # not supported by the system or file system
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    """Sync the folder: a rename or a deletion is the folder's content, not the file's."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise
    finally:
        os.close(handle)
