"""Room for checkpoints: on the disk, and in the host's memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchmuster.checkpoints.store import FolderStore
from torchmuster.errors import Impossible
from torchmuster.train.checkpointing import checkpointer
from torchmuster.train.checkpointing.checkpointer import Checkpointer
from torchmuster.train.world import join_world

pytestmark = pytest.mark.engine

STATE: dict[str, Any] = {"model": {"weight": torch.arange(100.0)}}


@pytest.fixture(autouse=True)
def _joined() -> Iterator[None]:
    with join_world("cpu"):
        yield


def test_too_little_space_is_refused_and_interrupted_saves_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-00000007-dead").mkdir()
    store = FolderStore(tmp_path)
    with Checkpointer(store) as saving:
        assert saving.check_room(STATE) == ""
        assert store.names() == []
        monkeypatch.setattr(store, "free_bytes", lambda: 399)
        with pytest.raises(Impossible, match="no space for a checkpoint"):
            saving.check_room(STATE)


def test_a_host_without_memory_for_copies_saves_synchronously(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = checkpointer.read_cpu()
    full = replace(host, total_bytes=10**9, used_bytes=10**9 - 399)
    monkeypatch.setattr(checkpointer, "read_cpu", lambda: full)
    monkeypatch.setattr(checkpointer, "async_save", None)
    with Checkpointer(tmp_path) as saving:
        assert "a host has no memory for copies of 400 B" in saving.check_room(STATE)
        saving.save(STATE, 3)
        report = saving.wait()
        assert report is not None
        assert report.problem is None
        room = {"model": {"weight": torch.zeros(100)}}
        loaded = saving.load(room)
    assert loaded is not None
    assert torch.equal(loaded.state["model"]["weight"], STATE["model"]["weight"])


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_no_checkpoint_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(Impossible, match="must be at least 1"):
        Checkpointer(tmp_path, keep=keep)
