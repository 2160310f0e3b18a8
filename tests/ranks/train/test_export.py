"""What two ranks saved, exported, is what they would have written as weights themselves."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rank_group import RunRanks
from rank_programs import exporting
from torchmuster.checkpoints.export import export_weights
from torchmuster.checkpoints.manifest import read_manifest
from torchmuster.checkpoints.store import FolderStore

pytestmark = pytest.mark.ranks


def test_an_export_is_what_the_ranks_would_have_written(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    name, _ = run_ranks(exporting.save_both_ways, 2, tmp_path)
    store = FolderStore(tmp_path / "c")
    manifest = read_manifest(store, name)
    assert manifest is not None
    done = export_weights(store, manifest, tmp_path / "out")
    assert done.files == ("model.safetensors",)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    written = load_file(tmp_path / "whole" / "model.safetensors")
    assert sorted(exported) == sorted(written)
    assert "head.weight" not in exported  # tied to embedding.weight, which comes first
    for key, tensor in written.items():
        assert exported[key].dtype == tensor.dtype
        assert exported[key].equal(tensor), key
