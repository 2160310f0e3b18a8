"""What a command will write is tested before its work."""

import json
import math
import tempfile
from pathlib import Path

import pytest

from torchmuster.cli import output
from torchmuster.errors import Impossible


def test_a_file_that_can_be_written_is_not_made(tmp_path: Path) -> None:
    output.refuse_unwritable(tmp_path / "plan.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused_with_its_command(tmp_path: Path) -> None:
    with pytest.raises(Impossible) as refused:
        output.refuse_unwritable(tmp_path / "a b" / "plan.yaml")
    assert refused.value.fix == f"mkdir -p '{tmp_path / 'a b'}'"


def test_a_folder_or_a_full_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Impossible, match="cannot write"):
        output.refuse_unwritable(tmp_path)

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(Impossible) as refused:
        output.refuse_unwritable(tmp_path / "plan.yaml")
    assert refused.value.why == "No space left on device"


def test_json_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"loss": [math.nan, 1.5], "limit": math.inf})
    shown = capsys.readouterr().out
    assert "NaN" not in shown
    assert json.loads(shown) == {"loss": [None, 1.5], "limit": None}


def test_results_get_a_new_folder_or_the_given_one(tmp_path: Path) -> None:
    first, second = output.new_folder(tmp_path, "bench-"), output.new_folder(tmp_path, "bench-")
    assert first != second
    assert output.new_folder(tmp_path, given=first) == first
    (tmp_path / "file").touch()
    with pytest.raises(Impossible, match="cannot create"):
        output.new_folder(tmp_path, given=tmp_path / "file")
