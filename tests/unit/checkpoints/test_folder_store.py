"""A folder as a store: a file is there whole, or not at all; names cannot lead elsewhere."""

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.checkpoints.store import MARKER, FolderStore, open_store
from torchmuster.checkpoints.verify import newest_good
from torchmuster.errors import Impossible

NAME = "step-00000010-00aa"


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "checkpoints")
    assert store.names() == []
    assert store.sizes(NAME) == {}
    store.write(NAME, "a.json", b"12345")
    assert store.sizes(NAME) == {"a.json": 5}
    assert store.read(NAME, "a.json", 0, 5) == b"12345"
    assert store.read(NAME, "a.json", 1, 3) == b"23"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        FolderStore(tmp_path).write(NAME, "a.json", b"12")
    assert list((tmp_path / NAME).iterdir()) == []


def test_what_is_written_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle: int) -> None:
        happened.append(
            "fsync " + Path(f"/proc/self/fd/{handle}").readlink().name.split(".")[-1][:4]
        )
        fsync(handle)

    def noted_replace(self: Path, target: Path) -> Path:
        happened.append(f"rename to {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    FolderStore(tmp_path / "c").write(NAME, "a.json", b"1")
    assert happened[1:] == ["rename to a.json", "fsync step", "fsync c"]
    assert happened[0].startswith("fsync ")


@pytest.mark.parametrize("name", ["..", "../x", "final", "/etc", "", "step-00000001-aaaa/.."])
def test_a_name_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    store = FolderStore(tmp_path)
    for use in (store.sizes, store.delete, lambda one: store.read(one, "a", 0, 1)):
        with pytest.raises(Impossible, match=re.escape(repr(name))):
            use(name)


@pytest.mark.parametrize("file", ["../a", "/etc/passwd", ".hidden", "a/b", "a\n", "x" * 101])
def test_a_file_cannot_lie_elsewhere(tmp_path: Path, file: str) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(Impossible, match=re.escape(repr(file))):
        store.read(NAME, file, 0, 1)
    with pytest.raises(Impossible):
        store.write(NAME, file, b"")
    assert list(tmp_path.iterdir()) == []


def test_only_regular_files_are_opened_and_nothing_is_waited_for(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (tmp_path / NAME / "a.json").mkdir(parents=True)
    os.mkfifo(tmp_path / NAME / MARKER)  # a reader would wait for a writer
    for file in (MARKER, "a.json"):
        with pytest.raises(OSError, match=r"regular file"):
            store.read(NAME, file, 0, 1)
    with pytest.raises(FileNotFoundError):
        store.read(NAME, "b.json", 0, 1)
    assert newest_good(store) is None


def test_what_another_deletes_at_the_same_time_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    for file in ("a.json", "b.json"):
        store.write(NAME, file, b"1")
    rmtree, calls = shutil.rmtree, []

    def overtaken(path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            (path / "a.json").unlink()
            raise FileNotFoundError(path / "a.json")
        rmtree(path)

    monkeypatch.setattr("shutil.rmtree", overtaken)
    store.delete(NAME)  # the other one deletes the rest
    store.delete(NAME)
    assert store.names() == []


def test_the_marker_is_deleted_first_and_a_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path / "c")
    for file in ("a.json", MARKER):
        store.write(NAME, file, b"1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    link = tmp_path / "c" / "step-00000011-00bb"
    link.symlink_to(elsewhere)
    store.delete(link.name)
    assert not link.is_symlink()
    assert (elsewhere / "precious").exists()

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        store.delete(NAME)
    assert store.sizes(NAME) == {"a.json": 1}
    monkeypatch.undo()
    store.delete(NAME)
    store.delete(NAME)  # what is not there need not be deleted
    assert store.names() == []


def test_places_are_folders_and_addresses(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    assert open_store(f"file://{tmp_path}").where == str(tmp_path)
    assert open_store(tmp_path).where == str(tmp_path)
    assert open_store("~/x").where == str(Path.home() / "x")
    with pytest.raises(Impossible) as refused:
        open_store("nosuch://bucket/x")
    assert refused.value.why == "Protocol not known: nosuch"
    assert (refused.value.what, refused.value.fix) == snapshot
