"""What tests with transformers share."""

from pathlib import Path

import pytest


@pytest.fixture
def quiet_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what transformers leaves behind, a variable of torch's compiler and a thread, from tests."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
