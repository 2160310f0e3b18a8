"""Object storage as a store, over fsspec's file system in memory: what every kind of it does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from syrupy.assertion import SnapshotAssertion

from made_up_checkpoints import SHARD, save, write
from torchmuster.checkpoints.store import MARKER, Store, open_store
from torchmuster.checkpoints.verify import keep_newest, newest_good, verify_checkpoint
from torchmuster.errors import Impossible, MusterError


@pytest.fixture
def store() -> Iterator[Store]:
    yield open_store("memory://bucket/run")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_checkpoints_are_written_read_and_kept(store: Store) -> None:
    assert store.names() == []
    assert store.free_bytes() is None
    old, middle, new = (save(store, step) for step in (10, 20, 30))
    remains = write(store, 15)
    assert verify_checkpoint(store, new.name) == []
    assert keep_newest(store, 2) == [old.name, remains.name]
    assert store.names() == [middle.name, new.name]
    path = f"/bucket/run/{new.name}/{SHARD.format(1)}"
    MemoryFileSystem().pipe_file(path, bytes(len(MemoryFileSystem().cat_file(path))))
    found = newest_good(store)
    assert found is not None
    assert found.name == middle.name
    assert [one.name for one in found.rejected] == ["checkpoint-file-changed"]
    assert found.rejected[0].evidence == f"memory:///bucket/run/{new.name}/{SHARD.format(1)}"


def test_the_marker_goes_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(store, 10).name
    deleted: list[str] = []
    monkeypatch.setattr(
        MemoryFileSystem, "rm_file", lambda self, path: deleted.append(Path(path).name)
    )
    store.delete(name)
    assert deleted[0] == MARKER
    assert sorted(deleted) == sorted({*deleted})
    assert len(deleted) == 3


def test_names_cannot_lead_elsewhere(store: Store) -> None:
    with pytest.raises(Impossible, match=r"\.\./secret"):
        store.read("step-00000010-00aa", "../secret", 0, 1)
    with pytest.raises(Impossible, match=r"'\.\.'"):
        store.delete("..")


def test_a_service_that_fails_is_not_a_damaged_checkpoint(
    store: Store, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    name = save(store, 10).name

    def gone(self: Any, *words: Any, **options: Any) -> None:
        raise ConnectionError("refused, token=hf_abcdefghijklmnopqrst")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", gone)
    for use in (lambda: verify_checkpoint(store, name), lambda: keep_newest(store, 1)):
        with pytest.raises(MusterError) as told:
            use()
        assert told.value.what.endswith(" memory:///bucket/run")
        assert told.value.why == "ConnectionError: refused, token=[redacted]"
        assert told.value.fix == snapshot
