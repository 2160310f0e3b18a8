"""What is kept: never less than the newest good one."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from made_up_checkpoints import save, write
from torchmuster.checkpoints.manifest import MARKER, best_manifest, committed_manifests
from torchmuster.checkpoints.store import FolderStore
from torchmuster.checkpoints.verify import keep_newest, sweep_unfinished


def committed_steps(store: FolderStore) -> list[int]:
    return sorted(manifest.step for manifest in committed_manifests(store))


def test_the_newest_are_kept_and_old_remains_go(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    first, second = save(store, 10), save(store, 20)
    remains, in_writing = write(store, 15), write(store, 40)
    save(store, 30)
    (tmp_path / "final").mkdir()
    assert keep_newest(store, 2) == [first.name, remains.name]
    assert committed_steps(store) == [20, 30]
    assert in_writing.name in store.names()
    assert (tmp_path / "final").is_dir()
    assert keep_newest(store, 1) == [second.name]
    assert keep_newest(store, 1) == []
    assert committed_steps(store) == [30]


def test_the_best_is_kept_in_addition_to_the_newest(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    former = save(store, 10, best={"loss": 2.0})
    best = save(store, 20, best={"loss": 1.0})
    for step in (30, 40, 50):
        save(store, step)
    assert former.name in keep_newest(store, 2)
    assert committed_steps(store) == [20, 40, 50]
    assert best_manifest(committed_manifests(store)) == best
    save(store, 60, best={"loss": 0.5})
    assert best.name in keep_newest(store, 1)
    assert committed_steps(store) == [60]


def test_a_run_that_begins_again_sweeps_away_what_was_not_finished(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    save(store, 10)
    older, newer, torn = write(store, 5), write(store, 40), save(store, 20)
    (tmp_path / torn.name / MARKER).write_bytes(b"{")
    assert sweep_unfinished(store) == [older.name, newer.name]
    assert len(store.names()) == 2  # what is damaged is for people to look at


def test_what_cannot_be_deleted_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    old = [save(store, step).name for step in (10, 20)]
    save(store, 30)

    def refuses(path: Path) -> None:
        if path.name == old[1]:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rmtree(path)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", refuses)
    assert keep_newest(store, 1) == [old[0]]
    assert MARKER not in store.sizes(old[1])  # half deleted, and so not a checkpoint any more
    monkeypatch.undo()
    assert keep_newest(store, 1) == [old[1]]
