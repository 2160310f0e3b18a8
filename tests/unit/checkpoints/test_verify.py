"""Torn, changed, lost and hostile files: each is named, nothing is used, the one before is taken."""

import errno
import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from made_up_checkpoints import SHARD, Whole, save, write
from torchmuster.checkpoints.manifest import MARKER, FileRecord, Manifest
from torchmuster.checkpoints.store import FolderStore
from torchmuster.checkpoints.verify import (
    inspect_checkpoint,
    newest_good,
    verify_checkpoint,
)
from torchmuster.finding import Status

FILES = [SHARD.format(1), SHARD.format(2), MARKER]
OTHER = {f"model.{one}": Whole(dtype="I8", shape=(2,), content=b"ab") for one in "xyz"}


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _emptied(path: Path) -> None:
    os.truncate(path, 0)


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def _grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def _of_another_checkpoint(path: Path) -> None:
    (other,) = (one for one in path.parent.parent.iterdir() if one != path.parent)
    content = (other / path.name).read_bytes()
    # Of the same size, so that it is not seen at once; what is alike in both has to be another for this.
    size = path.stat().st_size
    content = content if content != path.read_bytes() else content[::-1]
    path.write_bytes((content * 2)[:size] if path.name != MARKER else content)


DAMAGE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    # what is done: what a file's finding is called, what the marker's is
    "cut": (_cut, "checkpoint-file-truncated", "checkpoint-unreadable"),
    "emptied": (_emptied, "checkpoint-file-truncated", "checkpoint-unreadable"),
    "flipped": (_flipped, "checkpoint-file-changed", "checkpoint-unreadable"),
    "grown": (_grown, "checkpoint-file-changed", "checkpoint-unreadable"),
    "deleted": (Path.unlink, "checkpoint-file-missing", "checkpoint-unfinished"),
    "replaced": (_of_another_checkpoint, "checkpoint-file-changed", "checkpoint-unreadable"),
}


@dataclass(frozen=True)
class Saved:
    """A folder with two good checkpoints."""

    folder: Path
    before: Manifest
    newest: Manifest


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("two")
    store = FolderStore(folder)
    return Saved(folder, save(store, 10, ranks=3, tensors=OTHER), save(store, 20))


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_damage_to_each_file_is_named_and_the_one_before_is_used(
    tmp_path: Path, two: Saved, damage: str
) -> None:
    do, of_file, of_marker = DAMAGE[damage]
    for file in FILES:
        folder = tmp_path / file
        shutil.copytree(two.folder, folder)
        store = FolderStore(folder)
        assert verify_checkpoint(store, two.newest.name) == []
        do(folder / two.newest.name / file)
        (finding,) = verify_checkpoint(store, two.newest.name)
        assert finding.name == (of_marker if file == MARKER else of_file), file
        assert two.newest.name in finding.what
        assert finding.evidence.startswith(f"{folder}/{two.newest.name}")
        found = newest_good(store)
        assert found is not None
        assert found.name == two.before.name
        assert found.manifest == two.before
        assert found.rejected == (finding,)


def test_a_file_that_the_disk_cannot_read_is_damage(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    name = save(store, 20).name
    path = tmp_path / name / SHARD.format(1)
    size = path.stat().st_size

    class BadBlock(FolderStore):
        def read(self, name: str, file: str, begin: int, end: int) -> bytes:
            if file == SHARD.format(1):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(name, file, begin, end)

    (finding,) = verify_checkpoint(BadBlock(tmp_path), name)
    assert finding.name == "checkpoint-unreadable"
    assert finding.why == "Input/output error"
    assert size == path.stat().st_size


def test_sizes_are_enough_for_a_quick_look_and_hashes_for_the_truth(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    manifest = save(store, 20)
    _flipped(tmp_path / manifest.name / SHARD.format(1))
    assert inspect_checkpoint(store, manifest.name) == (manifest, [])
    read: list[int] = []
    assert len(verify_checkpoint(store, manifest.name, on_bytes=read.append)) == 1
    assert sum(read) == manifest.size_bytes


def test_the_newest_is_the_one_saved_last_also_after_going_back(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for step in (10, 20, 30):
        save(store, step)
    back = save(store, 20)
    unfinished = write(store, 40)
    found = newest_good(store)
    assert found is not None
    assert found.name == back.name
    assert [(one.name, one.status) for one in found.rejected] == [
        ("checkpoint-unfinished", Status.NOTE)
    ]
    assert unfinished.name in found.rejected[0].what


def test_a_stray_file_of_tensors_is_damage(tmp_path: Path) -> None:
    """torch reads every file of tensors in the folder."""
    store = FolderStore(tmp_path)
    name = save(store, 20).name
    (tmp_path / name / "notes.txt").touch()
    assert verify_checkpoint(store, name) == []
    shutil.copyfile(tmp_path / name / SHARD.format(1), tmp_path / name / SHARD.format(3))
    (finding,) = verify_checkpoint(store, name)
    assert finding.name == "checkpoint-file-extra"
    assert newest_good(store) is None


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self._canary), "w")


@pytest.mark.parametrize("listed", [False, True])
def test_a_pickle_in_any_place_executes_nothing(tmp_path: Path, two: Saved, listed: bool) -> None:
    """Also where whoever put it there has written a manifest that fits."""
    canary = tmp_path / "canary"
    bomb = pickle.dumps(_Bomb(canary))
    pickle.loads(bomb).close()
    assert canary.exists()
    canary.unlink()
    record = FileRecord(size_bytes=len(bomb), sha256=hashlib.sha256(bomb).hexdigest())
    for file in FILES:
        folder = tmp_path / file
        shutil.copytree(two.folder, folder)
        store = FolderStore(folder)
        (folder / two.newest.name / file).write_bytes(bomb)
        fits = listed and file != MARKER
        if fits:
            files = {**two.newest.files, file: record}
            forged = msgspec.structs.replace(two.newest, files=files)
            (folder / two.newest.name / MARKER).write_bytes(forged.to_json())
        found = newest_good(store)
        assert found is not None
        assert found.name == (two.newest.name if fits else two.before.name)
        assert not canary.exists()
