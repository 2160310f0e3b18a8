"""Weights as a folder for others: every tensor bit by bit, under its own name, and nothing half done."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from made_up_checkpoints import A_WEIGHT, Whole, save
from torchmuster.checkpoints.export import ExportRequest, ExportResult
from torchmuster.checkpoints.manifest import Manifest
from torchmuster.checkpoints.store import FolderStore
from torchmuster.errors import Impossible, MusterError
from torchmuster.worker.exported import export_weights

pytestmark = pytest.mark.engine

TENSORS = {
    "model.flags": Whole(dtype="BOOL", shape=(3,), content=b"\1\0\1"),
    "model.layers.0.weight": A_WEIGHT,
    "model.layers.1.weight": Whole(
        dtype="BF16", shape=(3, 4), content=bytes(range(24)), cuts=((1,), ())
    ),
    "model.count": Whole(dtype="I64", shape=(), content=b"\7" + bytes(7)),
    "optimizer.state.layers.0.weight.exp_avg": A_WEIGHT,
}
LORA = {
    f"model.base_model.model.{name}": A_WEIGHT
    for name in (
        "model.embed_tokens.lora_embedding_A.default",
        "model.layers.0.q_proj.base_layer.weight",
        "model.layers.0.q_proj.lora_A.default.weight",
        "lm_head.original_module.weight",
        "lm_head.modules_to_save.default.weight",
        "default.weight",
    )
}


def export(folder: Path, saved: Manifest, **how: Any) -> ExportResult:
    finish = how.pop("finish", None)
    options = {name: how.pop(name) for name in ("most_in_a_file_bytes",) if name in how}
    request = ExportRequest(
        checkpoint=str(folder / "c" / saved.name), folder=str(folder / "out"), **how
    )
    return export_weights(request, finish=finish or (lambda _: ExportResult()), **options)


def test_the_model_alone_under_its_own_names(tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    for name in ("config.json", "additional_chat_templates/tool.jinja"):
        (beside / name).parent.mkdir(exist_ok=True, parents=True)
        (beside / name).write_text("{}")
    saved = save(
        FolderStore(tmp_path / "c"),
        5,
        TENSORS,
        ranks=6,
        tied={"model.head": "model.layers.0.weight"},
    )
    done = export(tmp_path, saved, beside=str(beside))
    path = tmp_path / "out" / "model.safetensors"
    assert done.files == ("model.safetensors",)
    assert done.compared == 4
    assert done.size_bytes == path.stat().st_size
    assert done.beside == ("additional_chat_templates", "config.json")
    tensors = load_file(path)
    assert set(tensors) == {"flags", "layers.0.weight", "layers.1.weight", "count"}
    for name, tensor in tensors.items():
        content = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
        assert content == TENSORS[f"model.{name}"].content, name
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["beside", "c", "out"]


def test_of_lora_the_adapter_alone_under_the_names_of_peft(tmp_path: Path) -> None:
    saved = save(FolderStore(tmp_path / "c"), 5, {**LORA, "optimizer.x": A_WEIGHT})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    done = export(tmp_path, saved, beside=str(tmp_path / "model"))
    assert done.files == ("adapter_model.safetensors",)
    assert set(load_file(tmp_path / "out" / "adapter_model.safetensors")) == {
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.q_proj.lora_A.weight",
        "base_model.model.lm_head.weight",
    }


def test_lora_without_its_config_is_refused(tmp_path: Path) -> None:
    """Next to a config.json, these names would give a model with random weights."""
    saved = save(FolderStore(tmp_path / "c"), 5, LORA)
    with pytest.raises(Impossible, match=r"adapter_config\.json is missing"):
        export(tmp_path, saved)
    assert not (tmp_path / "out").exists()
    assert export(tmp_path, saved, as_it_is=True).compared == len(LORA)  # a model of the user's


def test_a_large_model_becomes_several_files_and_a_map(tmp_path: Path) -> None:
    saved = save(FolderStore(tmp_path / "c"), 5, TENSORS, ranks=6)
    done = export(tmp_path, saved, most_in_a_file_bytes=35)
    assert done.files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 67}
    for file in done.files:
        names = {name for name, place in index["weight_map"].items() if place == file}
        assert names == set(load_file(tmp_path / "out" / file))


class _Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_in_place_of_weights_is_not_executed(tmp_path: Path) -> None:
    saved = save(FolderStore(tmp_path / "c"), 5)
    for file in (tmp_path / "c" / saved.name).glob("*.safetensors"):
        file.write_bytes(pickle.dumps(_Bomb(tmp_path / "executed")))
    with pytest.raises(MusterError, match="its files are damaged"):
        export(tmp_path, saved)
    assert [one.name for one in tmp_path.iterdir()] == ["c"]


def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path / "c")
    good = save(store, 5)
    with pytest.raises(Impossible, match="has no weights"):
        export(tmp_path, save(store, 6, {"optimizer.x": A_WEIGHT}))

    def refuse(folder: Path) -> ExportResult:
        raise MusterError("it is wrong")

    with pytest.raises(MusterError, match="it is wrong"):
        export(tmp_path, good, finish=refuse)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 31}))
        with pytest.raises(Impossible, match=r"32 B, but 31 B"):
            export(tmp_path, good)
    (file, *_) = (tmp_path / "c" / good.name).glob("*.safetensors")
    file.write_bytes(b"no header")
    with pytest.raises(MusterError, match="its files are damaged"):
        export(tmp_path, good)
    assert [one.name for one in tmp_path.iterdir()] == ["c"]
    (tmp_path / "out").mkdir()
    with pytest.raises(Impossible, match="already exists"):
        export(tmp_path, save(store, 7))
