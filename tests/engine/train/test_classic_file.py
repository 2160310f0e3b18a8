"""One-file checkpoints: what comes back, what is refused and in which words."""

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from syrupy.assertion import SnapshotAssertion
from torch import nn

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.legacy import checkpoint_file

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


def tree_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return {
        "model": checkpoint_file.model_state(model),
        "optimizer": checkpoint_file.optimizer_state(optimizer, model),
    }


def test_everything_comes_back_bit_by_bit(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "numbers": [1, 2.5, None, True, "text"],
        "pair": (0.9, 0.999),
        "kinds": {
            str(kind): torch.ones(2, 3).to(kind)
            for kind in (torch.bfloat16, torch.int64, torch.bool)
        },
        "scalar": torch.tensor(3.0),
        "turned": torch.arange(6).view(2, 3).t(),
        "part": torch.arange(10)[3:5],
        "empty": torch.empty(0, 4),
    }
    tree["same"] = tree["turned"]
    checkpoint_file.write_parts(tmp_path / "new folder" / "a.safetensors", tree)
    back = checkpoint_file.read_file(tmp_path / "new folder" / "a.safetensors")
    assert back.keys() == tree.keys()
    assert back["numbers"] == tree["numbers"]
    assert back["pair"] == (0.9, 0.999)
    assert isinstance(back["pair"], tuple)
    for name in ("scalar", "turned", "part", "empty", "same"):
        assert torch.equal(back[name], tree[name])
        assert back[name].dtype == tree[name].dtype
    for name, tensor in tree["kinds"].items():
        assert torch.equal(back["kinds"][name], tensor)
    assert [one.name for one in (tmp_path / "new folder").iterdir()] == ["a.safetensors"]
    # Any program can read the tensors, and a shared one is there once.
    assert "same" not in load_file(tmp_path / "new folder" / "a.safetensors")


def test_a_model_and_its_optimizer_come_back_under_their_own_names(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint_file.write_parts(tmp_path / "a", tree_of(model, optimizer))
    assert "model/0.weight" in load_file(tmp_path / "a")
    other, other_optimizer = trained(seed=1)
    checkpoint_file.load_states(
        checkpoint_file.read_file(tmp_path / "a"), other, other_optimizer, tmp_path / "a"
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    saved, loaded = optimizer.state_dict(), other_optimizer.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    assert loaded["param_groups"][0]["betas"] == (0.8, 0.9)
    for number, state in saved["state"].items():
        for name, value in state.items():
            assert torch.equal(loaded["state"][number][name], value)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    checkpoint_file.write_parts(path, {"epoch": 1})

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_file, "save_file", full)
    with pytest.raises(MusterError, match=f"cannot write the checkpoint {path}") as caught:
        checkpoint_file.write_parts(path, {"epoch": 2})
    assert "No space left on device" in caught.value.why
    assert checkpoint_file.read_file(path) == {"epoch": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


class Hostile:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("writer", ["torch.save", "old torch.save", "pickle"])
def test_a_pickle_is_refused_and_not_run(
    tmp_path: Path, writer: str, snapshot: SnapshotAssertion
) -> None:
    bad = Hostile(str(tmp_path / "executed"))
    if writer == "pickle":
        (tmp_path / "bad.pt").write_bytes(pickle.dumps(bad))
    else:
        torch.save(bad, tmp_path / "bad.pt", _use_new_zipfile_serialization=writer == "torch.save")
    with pytest.raises(Impossible) as refused:
        checkpoint_file.read_file(tmp_path / "bad.pt")
    assert not (tmp_path / "executed").exists()
    assert "torch.load(path, weights_only=True)" in refused.value.fix
    assert refused.value == snapshot


@pytest.mark.parametrize("first", [b"\x80", b"PK"])
def test_a_checkpoint_whose_length_begins_as_a_pickle_does_is_read(
    tmp_path: Path, first: bytes
) -> None:
    """The first bytes of a safetensors file are a length: any bytes."""
    path = tmp_path / "a"
    checkpoint_file.write_parts(path, {"text": ""})
    shortest = int.from_bytes(path.read_bytes()[:8], "little")
    text = "x" * (int.from_bytes(first, "little") - shortest)
    checkpoint_file.write_parts(path, {"text": text})
    assert path.read_bytes().startswith(first)
    assert checkpoint_file.read_file(path) == {"text": text}


def test_files_that_are_no_checkpoint_are_named(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible, match="missing") as refused:
        checkpoint_file.read_file(tmp_path / "missing")
    assert refused.value == snapshot
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights")
    with pytest.raises(Impossible, match="weights") as refused:
        checkpoint_file.read_file(tmp_path / "weights")
    assert refused.value == snapshot
    for header in ({"__tensor__": "gone"}, {"__tuple__": 3}, "["):
        text = header if isinstance(header, str) else json.dumps(header)
        save_file({"weight": torch.zeros(2)}, tmp_path / "odd", metadata={"torchmuster": text})
        with pytest.raises(MusterError, match="odd is damaged"):
            checkpoint_file.read_file(tmp_path / "odd")


def test_a_damaged_file_is_named_wherever_it_is_cut(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint_file.write_parts(tmp_path / "a", tree_of(model, optimizer))
    whole = (tmp_path / "a").read_bytes()
    for length in [0, 1, 5, 8, 9, 100, *random.Random(0).sample(range(len(whole)), 20)]:
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(MusterError, match=r"the checkpoint .*cut is damaged"):
            checkpoint_file.read_file(tmp_path / "cut")


def test_what_cannot_be_kept_is_named(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible, match="optimizer/hook") as refused:
        checkpoint_file.write_parts(tmp_path / "a", {"optimizer": {"hook": trained}})
    assert refused.value == snapshot
    assert list(tmp_path.iterdir()) == []


def test_another_model_or_optimizer_is_refused_before_anything_changes(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    model, optimizer = trained()
    tree = tree_of(model, optimizer)
    wider = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5), nn.Linear(5, 1))
    with pytest.raises(Impossible) as refused:
        checkpoint_file.load_states(tree, wider, None, Path("x"))
    assert "2.weight: (2, 4)" in refused.value.why
    assert "3.weight" in refused.value.why
    assert refused.value == snapshot

    other, _ = trained(seed=1)
    before = other.state_dict()["0.weight"].clone()
    with pytest.raises(Impossible) as refused:
        checkpoint_file.load_states(tree, other, torch.optim.SGD(other.parameters()), Path("x"))
    assert "AdamW" in refused.value.why
    assert refused.value == snapshot
    with pytest.raises(Impossible) as refused:
        checkpoint_file.load_states(tree, other, torch.optim.AdamW(other.parameters()), Path("x"))
    assert refused.value == snapshot
    assert torch.equal(other.state_dict()["0.weight"], before)
    with pytest.raises(Impossible) as refused:
        checkpoint_file.optimizer_state(optimizer, other)
    assert refused.value == snapshot
