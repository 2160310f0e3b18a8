"""A disk that is full costs lines of metrics, not the training."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from torchmuster.train.reports import MetricsFiles

pytestmark = pytest.mark.engine


def test_a_file_that_cannot_be_written_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = MetricsFiles(tmp_path)
    path = tmp_path / "metrics" / "evaluations.jsonl"
    assert files.add("evaluations", {"step": 1}) == ""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        said = files.add("evaluations", {"step": 2})
        assert "No space left on device" in said
        assert "training continues" in said
        assert files.add("evaluations", {"step": 3}) == "", "it is said once"
    assert files.add("evaluations", {"step": 4}) == ""
    lines = path.read_text().split()
    assert [json.loads(line)["step"] for line in lines] == [1, 4]
