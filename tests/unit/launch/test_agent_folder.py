"""The folders of node agents that were killed together with their reapers are removed by the next one."""

import os
import tempfile
from pathlib import Path

import pytest

from torchmuster.launch.node.agent_folder import create_agent_folder, hold_agent_folder


def test_only_abandoned_folders_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held, abandoned, new = (create_agent_folder() for _ in range(3))
    other = Path(tempfile.mkdtemp(prefix="torchmuster-"))
    target = tmp_path / "target"
    target.mkdir()
    link = tmp_path / "torchmuster-node-link"
    link.symlink_to(target)
    (abandoned / "attempt-0").mkdir()
    for folder in (held, abandoned, other, target):
        os.utime(folder, (1, 1))
    lock = hold_agent_folder(held)
    assert lock is not None
    try:
        created = create_agent_folder()
        assert set(tmp_path.iterdir()) == {held, new, other, target, link, created}
    finally:
        os.close(lock)
    create_agent_folder()
    assert not held.exists(), "its node agent has exited"
