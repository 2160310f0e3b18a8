"""Where checkpoints are: a folder of a local or shared disk, or object storage.

Each checkpoint is a folder ``step-<number>-<hex digits>`` of plain files. Names also come from manifests and
listings, so every store checks them: a manifest cannot name a file elsewhere.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from torchmuster.errors import Impossible
from torchmuster.redaction import harmless, redact_text

if TYPE_CHECKING:
    from torchmuster.checkpoints.object_storage import ObjectStore

MARKER = "manifest.json"  # written last: a folder without it is not a checkpoint
_CHECKPOINT = re.compile(r"step-(\d{8,15})-[0-9a-f]{4,16}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)  # some shared file systems cannot sync a folder
T = TypeVar("T")
Store: TypeAlias = "FolderStore | ObjectStore"


def open_store(location: str | Path) -> Store:
    """Open a folder, or a URL that fsspec supports (``s3://bucket/prefix``); create nothing yet."""
    text = str(location)
    if text.startswith("file://"):
        return FolderStore(Path(text.removeprefix("file://")))
    if "://" not in text:
        return FolderStore(Path(text).expanduser())
    from torchmuster.checkpoints.object_storage import ObjectStore  # importing fsspec is slow

    try:
        return ObjectStore.at(text)
    except (ImportError, ValueError) as error:
        protocol = text.split("://", 1)[0]
        fix = "install the package that fsspec names for it"
        if protocol in ("s3", "s3a"):
            fix = "pip install 'torchmuster[s3]'"
        raise Impossible(
            f"cannot access checkpoints at {protocol}://", why=redact_text(str(error)), fix=fix
        ) from None


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name; None if the name is invalid."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


def in_order(names: list[str]) -> list[str]:
    """Return the valid checkpoint names, in the order of their steps."""
    return sorted(filter(_CHECKPOINT.fullmatch, names), key=lambda name: (step_of(name), name))


def checked_name(name: str) -> str:
    """Return a checkpoint's name if it is valid, so that it is safe in a path."""
    if step_of(name) is None:
        raise Impossible(
            f"{harmless(name)!r} is not a checkpoint name",
            why="checkpoint names have the form step-<number>-<hexadecimal digits>",
            fix="muster checkpoint list shows the names",
        )
    return name


def is_file_name(file: str) -> bool:
    """Return whether this can be the name of a checkpoint's file."""
    return _FILE.fullmatch(file) is not None


def checked_file(file: str) -> str:
    """Return the name of a checkpoint's file if it is valid, so that it is safe in a path."""
    if not is_file_name(file):
        raise Impossible(
            f"{harmless(file)!r} is not a valid checkpoint file name",
            why="file names have letters, digits, dots, dashes and underscores",
        )
    return file


def decode_strictly(text: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Parse JSON of exactly this type; ValueError describes the error."""
    try:
        return msgspec.json.decode(text, type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(harmless(str(error))) from None


class FolderStore:
    """Checkpoints in a folder. Methods raise OSError or MusterError on failure.

    :class:`~torchmuster.checkpoints.object_storage.ObjectStore` has the same methods.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    @property
    def where(self) -> str:
        """The folder or URL, for display."""
        return str(self._folder)

    @property
    def folder(self) -> Path:
        """The folder, where ranks can write files."""
        return self._folder

    def names(self) -> list[str]:
        """Return every checkpoint, including unfinished ones, in the order of their steps."""
        try:
            return in_order([path.name for path in self._folder.iterdir() if path.is_dir()])
        except FileNotFoundError:
            return []

    def sizes(self, name: str) -> dict[str, int | None]:
        """Return the size of each file in a checkpoint; None for an entry that is not a regular file."""
        sizes: dict[str, int | None] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._path(name)) as entries:
            for entry in entries:
                sizes[entry.name] = None
                with contextlib.suppress(
                    FileNotFoundError
                ):  # deleted meanwhile, or a dangling link
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    def read(self, name: str, file: str, begin: int, end: int) -> bytes:
        """Return a range of a file's bytes; FileNotFoundError if it does not exist."""
        path = self._path(name, file)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with os.fdopen(handle, "rb") as stream:
            stream.seek(begin)
            return stream.read(end - begin)

    def write(self, name: str, file: str, content: bytes) -> None:
        """Write a small file: complete and durable on return, or absent after an error."""
        path = self._path(name, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        try:
            with temporary.open("xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
            for folder in (path.parent, self._folder):
                _sync_folder(folder)
        except BaseException:
            with contextlib.suppress(OSError):  # report the first error
                temporary.unlink(missing_ok=True)
            raise

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its marker first, so that a partial one never counts as complete."""
        folder = self._path(name)
        if folder.is_symlink():
            folder.unlink()
            return
        with contextlib.suppress(FileNotFoundError):  # another process may be deleting it too
            (folder / MARKER).unlink(missing_ok=True)
            _sync_folder(folder)
            shutil.rmtree(folder)

    def free_bytes(self) -> int | None:
        """Return the free space; None if it is not limited."""
        folder = self._folder
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def _path(self, name: str, file: str | None = None) -> Path:
        folder = self._folder / checked_name(name)
        return folder if file is None else folder / checked_file(file)


def _sync_folder(folder: Path) -> None:
    """Sync the folder: a rename or a deletion is the folder's content, not the file's."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)
