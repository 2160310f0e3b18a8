"""What is kept: never less than the newest good one."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from made_up_checkpoints import save, write
from torchmuster.checkpoints.store import FolderStore
from torchmuster.checkpoints.manifest import MARKER, best_manifest, committed_manifests
from torchmuster.checkpoints.verify import (
    committed_steps,
    keep_newest,
    newest_good,
    sweep_unfinished,
)


def _damage(store: FolderStore, name: str) -> None:
    path = Path(store.where) / name / "state.json"
    path.write_bytes(bytes(path.stat().st_size))


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


def test_nothing_is_deleted_before_a_good_one_is_found(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    manifests = [save(store, step) for step in (10, 20, 30, 40)]
    _damage(store, manifests[3].name)
    _damage(store, manifests[2].name)
    assert keep_newest(store, 1) == [manifests[0].name]
    found = newest_good(store)
    assert found is not None
    assert found.manifest.step == 20
    _damage(store, manifests[1].name)
    assert keep_newest(store, 1) == []
    assert committed_steps(store) == [20, 30, 40]


def test_of_one_just_committed_the_sizes_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    old, new = save(store, 10), save(store, 20)
    monkeypatch.setattr("torchmuster.checkpoints.verify.verify_checkpoint", None)  # would be called
    (tmp_path / new.name / "state.json").unlink()
    with pytest.raises(TypeError):  # so the next one is looked at in full
        keep_newest(store, 1, just_committed=new.name)
    again = save(store, 30)
    assert keep_newest(store, 1, just_committed=again.name) == [new.name, old.name]


def test_one_saved_after_going_back_is_the_newest(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    names = {step: save(store, step).name for step in (10, 20, 30)}
    back = save(store, 15)
    assert keep_newest(store, 2, just_committed=back.name) == [names[20], names[10]]
    assert committed_steps(store) == [15, 30]


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
    with pytest.raises(ValueError, match="at least 1"):
        keep_newest(store, 0)
