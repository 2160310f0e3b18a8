"""What two ranks saved, exported, is what they would have written as weights themselves."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rank_group import RunRanks
from rank_programs import exporting
from torchmuster.checkpoints.export import ExportRequest
from torchmuster.worker.exported import export_weights

pytestmark = pytest.mark.ranks


def test_an_export_is_what_the_ranks_would_have_written(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    name, _ = run_ranks(exporting.save_both_ways, 2, tmp_path)
    request = ExportRequest(checkpoint=str(tmp_path / "c" / name), folder=str(tmp_path / "out"))
    done = export_weights(request)
    assert done.files == ("model.safetensors",)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    written = load_file(tmp_path / "whole" / "model.safetensors")
    assert sorted(exported) == sorted(written)
    assert "head.weight" not in exported  # tied to embedding.weight, which comes first
    for key, tensor in written.items():
        assert exported[key].dtype == tensor.dtype
        assert exported[key].equal(tensor), key
