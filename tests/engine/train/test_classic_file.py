"""One-file checkpoints: what comes back, what is refused and in which words."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from made_up_worlds import made_up_world
from torchmuster.errors import MusterError
from torchmuster.train.legacy import checkpoint_file
from torchmuster.train.legacy.checkpoint_file import read_file, write_file

pytestmark = pytest.mark.engine


def trained(seed: int = 0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 1e-2},
        {"params": [*model[1].parameters(), *model[2].parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def content_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"epoch": 3, **checkpoint_file.states_of(model, optimizer)}


def test_a_model_and_its_optimizer_come_back_bit_by_bit(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = tmp_path / "new folder" / "a.pt"
    write_file(path, content_of(model, optimizer))
    assert [file.name for file in path.parent.iterdir()] == ["a.pt"]
    other, other_optimizer = trained(seed=1)
    checkpoint_file.load_states(read_file(path), other, other_optimizer, path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    saved, loaded = optimizer.state_dict(), other_optimizer.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    assert loaded["param_groups"][0]["betas"] == (0.8, 0.9)
    for number, state in saved["state"].items():
        for name, value in state.items():
            assert torch.equal(loaded["state"][number][name], value)


@pytest.mark.parametrize("cause", ["disk", "pickle"])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    path = tmp_path / "a"
    write_file(path, {"epoch": 1})
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    content: dict[str, Any] = {"epoch": 2}
    expected = "No space left on device"
    if cause == "disk":
        monkeypatch.setattr(os, "fsync", full)
    else:
        content["function"] = lambda: None
        expected = "pickle"
    with pytest.raises(MusterError, match=f"cannot write the checkpoint {path}") as caught:
        checkpoint_file.save_together(path, content, made_up_world())
    assert expected in caught.value.why
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


class Hostile:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_file_is_not_run(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "bad.pt"
    bad = {"epoch": Hostile(str(tmp_path / "executed"))}
    torch.save(bad, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(MusterError, match=r"bad\.pt is damaged, or was not written by"):
        read_file(path)
    assert not (tmp_path / "executed").exists()


def test_files_that_are_no_checkpoint_are_named(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "weights")
    with pytest.raises(MusterError, match="weights is damaged, or was not written by"):
        read_file(tmp_path / "weights")
    with pytest.raises(MusterError, match="cannot read a checkpoint"):
        read_file(tmp_path / "nowhere")


def test_a_damaged_file_is_named_wherever_it_is_cut(tmp_path: Path) -> None:
    model, optimizer = trained()
    write_file(tmp_path / "a", content_of(model, optimizer))
    whole = (tmp_path / "a").read_bytes()
    for length in [0, 1, 5, 8, 9, 100, *random.Random(0).sample(range(len(whole)), 20)]:
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(MusterError, match=r"the checkpoint .*cut is damaged"):
            read_file(tmp_path / "cut")


def test_another_model_or_optimizer_is_refused() -> None:
    model, optimizer = trained()
    content = content_of(model, optimizer)
    wider = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5), nn.Linear(5, 1))
    with pytest.raises(MusterError) as refused:
        checkpoint_file.load_states(content, wider, None, Path("x"))
    assert "2.weight" in refused.value.why
    assert "3.weight" in refused.value.why
    other, _ = trained(seed=1)
    with pytest.raises(MusterError, match="does not match"):  # other groups
        checkpoint_file.load_states(
            content, other, torch.optim.AdamW(other.parameters()), Path("x")
        )
