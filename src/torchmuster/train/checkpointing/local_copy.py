"""The folders that torch writes and reads: the store's own, or for object storage temporary ones, one per host."""

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchmuster.checkpoints.store import FolderStore, Store
from torchmuster.errors import Impossible
from torchmuster.train.checkpointing.ranks import Ranks

_PREFIX = "muster-checkpoints-"
_LOCK = "in-use"


class LocalCopy:
    """Checkpoints as folders on this host; all ranks create it together."""

    def __init__(self, store: Store, ranks: Ranks) -> None:
        self._remote = None if isinstance(store, FolderStore) else store
        self._ranks = ranks
        self._lock: int | None = None
        if isinstance(store, FolderStore):
            folder = store.folder
            same_host = list(range(ranks.size))  # they share the work of all hosts
        else:
            folder, same_host = self._folder_of_host()
        self._folder = folder
        self._number, self._count = same_host.index(ranks.rank), len(same_host)
        self.store = FolderStore(folder)

    def folder(self, name: str) -> Path:
        """Return the folder of a checkpoint."""
        return self._folder / name

    def share(self, files: Sequence[str]) -> Sequence[str]:
        """Return the files that this rank checks; together the ranks of a folder check all of them."""
        return files[self._number :: self._count]

    def download(self, name: str, file: str) -> None:
        """Get a file from object storage."""
        if self._remote is not None:
            self.folder(name).mkdir(exist_ok=True)
            self._remote.download(name, file, self.folder(name) / file)

    def upload(self, name: str, paths: Sequence[Path]) -> None:
        """Copy this rank's files to object storage."""
        if self._remote is not None:
            for path in paths:
                self._remote.upload(name, path)

    def clear(self, name: str) -> None:
        """Delete the temporary copy of a checkpoint, if it is one; all ranks have read or uploaded it."""
        if self._remote is not None and self._number == 0:
            shutil.rmtree(self.folder(name), ignore_errors=True)

    def refuse_unshared(self) -> None:
        """Raise if a rank does not see the folder that rank 0 sees."""
        if self._remote is not None or self._ranks.size == 1:
            return
        probe = self._folder / self._ranks.from_first(f".seen-by-all-{os.urandom(4).hex()}")
        with self._ranks.together():
            if self._ranks.is_first:
                self._folder.mkdir(parents=True, exist_ok=True)
                probe.touch()
        seen = self._ranks.from_all(probe.exists())
        if self._ranks.is_first:
            probe.unlink(missing_ok=True)
        if not all(seen):
            raise Impossible(
                f"the ranks do not save to the same folder: rank {seen.index(False)} does not see rank 0's",
                why=f"{seen.count(False)} of {len(seen)} ranks have another {self._folder}",
                fix="save to a folder that all hosts share, or to object storage",
            )

    def close(self) -> None:
        """Delete the temporary folder."""
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def _folder_of_host(self) -> tuple[Path, list[int]]:
        """Create a temporary folder on each host; return this host's, and the ranks that share it."""
        parent = Path(tempfile.gettempdir())
        disk = parent.stat()  # containers may have the same host name
        hosts = self._ranks.from_all((socket.gethostname(), disk.st_dev, disk.st_ino))
        same_host = [rank for rank, host in enumerate(hosts) if host == hosts[self._ranks.rank]]
        created = None
        with self._ranks.together():
            if same_host[0] == self._ranks.rank:
                _delete_abandoned(parent)
                created = tempfile.mkdtemp(prefix=_PREFIX)
                self._lock = _locked(Path(created))
        return Path(self._ranks.from_all(created)[same_host[0]]), same_host


def _locked(folder: Path) -> int | None:
    """Lock a folder until this process ends; None if another process has locked it."""
    import fcntl  # not on Windows

    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _delete_abandoned(parent: Path) -> None:
    """Delete the folders of processes of this user that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = _locked(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
