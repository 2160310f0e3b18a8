"""Who takes part: read from the launcher, or one process alone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from patience import GIVE_UP_S
from torchmuster.launch.probes import process_group
from torchmuster.launch.rank import start
from torchmuster.train.world import join_world

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(variable, raising=False)


def test_one_process_without_a_launcher_is_a_group_of_one_that_ends() -> None:
    with join_world("cpu") as world:
        assert (world.global_rank, world.local_rank, world.world_size) == (0, 0, 1)
        assert world.is_first
        assert world.device == torch.device("cpu")
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_after_an_error_only_gloo_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[str] = []
    destroy, backend = dist.destroy_process_group, "nccl"
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(backend))
    try:
        with pytest.raises(ValueError, match="a bad batch"), join_world("cpu"):
            raise ValueError("a bad batch")
        assert destroyed == []
        with contextlib.suppress(ValueError):
            try:
                raise ValueError("a bad batch")
            finally:
                process_group.cleanup_process_group()
        assert destroyed == []
        process_group.cleanup_process_group()
        assert destroyed == ["nccl"]
        backend = "gloo"
        with contextlib.suppress(ValueError):
            try:
                raise ValueError("a bad batch")
            finally:
                process_group.cleanup_process_group()
        assert destroyed == ["nccl", "gloo"]
    finally:
        destroy()


@pytest.mark.slow
def test_the_error_of_a_rank_is_recorded_before_the_cleanup(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\n"
        "import torch.distributed as dist\n"
        "from torchmuster import join_world\n"
        "dist.destroy_process_group = os.abort  # as NCCL's watchdog does after an assertion on the GPU\n"
        "with join_world('cpu'):\n"
        "    raise ValueError('label 10 of 10 classes')\n"
    )
    settings = {"records": str(tmp_path), "world_size": 1, "first_step": 0, "module": False}
    settings["parent"] = os.getpid()
    done = subprocess.run(
        [sys.executable, start.__file__, json.dumps(settings), "train.py"],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "TORCHMUSTER_RECORD": "0"},
        cwd=tmp_path,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == -signal.SIGABRT
    record = json.loads((tmp_path / "rank-0.error.json").read_text())
    assert record["error"] == "ValueError: label 10 of 10 classes"
    assert "train.py" in record["traceback"]
