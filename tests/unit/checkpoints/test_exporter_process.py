"""The process that checks an export."""

from pathlib import Path

import pytest

from torchmuster.checkpoints import export
from torchmuster.checkpoints.export import ExportRequest, run_exporter


def test_a_check_without_an_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_check.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(export, "PROGRAM", "slow_check")
    result = run_exporter(ExportRequest(folder=str(tmp_path)), limit_s=1.0)
    assert result.unchecked == "names not compared: the check took longer than 1 s"
