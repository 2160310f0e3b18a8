"""Files that torch and safetensors wrote: complete as they are, torn wherever they are cut."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from torchmuster.checkpoints.foreign import Completeness, condition_of

pytestmark = pytest.mark.engine
STATE = {"weight": torch.arange(3000.0), "bias": torch.ones(7), "step": 12}


def _torn_wherever_it_is_cut(checkpoint: Path, file: Path, library: str) -> None:
    assert condition_of(str(checkpoint), library).state is Completeness.COMPLETE
    whole = file.read_bytes()
    for place in range(20):
        file.write_bytes(whole[: len(whole) * place // 20])
        found = condition_of(str(checkpoint), library)
        assert found.state is Completeness.TORN, f"cut at {place}/20"
        assert file.name in found.why
    file.write_bytes(whole[:-1])
    assert condition_of(str(checkpoint), library).state is Completeness.TORN
    file.write_bytes(whole)
    assert condition_of(str(checkpoint), library).state is Completeness.COMPLETE


def test_a_file_of_torch_save(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.save(STATE, path)
    _torn_wherever_it_is_cut(path, path, "torch.save")


def test_a_file_of_the_old_format_is_not_called_torn(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    found = condition_of(str(tmp_path / "old.pt"), "torch.save")
    assert found.state is Completeness.COMPLETE


def test_a_file_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(100), "half": torch.ones(9, dtype=torch.bfloat16)}, path)
    _torn_wherever_it_is_cut(path, path, "transformers")


@pytest.mark.filterwarnings("ignore")  # torch warns that there is no process group
def test_a_folder_of_dcp(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    save_sharded({"model": STATE}, checkpoint_id=folder)
    assert condition_of(str(folder), "DCP").state is Completeness.COMPLETE
    (folder / ".metadata").unlink()
    found = condition_of(str(folder), "DCP")
    assert found.state is Completeness.TORN
    assert ".metadata" in found.why
