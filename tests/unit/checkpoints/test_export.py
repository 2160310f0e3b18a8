"""Weights as a folder for others: every element in its place, little memory, nothing half done."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_checkpoints import A_WEIGHT, Part, Whole, save, write_parts
from torchmuster.checkpoints.export import Exported, export_weights
from torchmuster.checkpoints.manifest import commit_checkpoint
from torchmuster.checkpoints.store import FolderStore
from torchmuster.checkpoints.tensor_files import ELEMENT_BYTES, read_head
from torchmuster.errors import Impossible, MusterError

MiB = 2**20


TENSORS = {
    "model.flags": Whole(dtype="BOOL", shape=(3,), content=b"\1\0\1"),
    "model.layers.0.weight": A_WEIGHT,
    "model.layers.1.weight": Whole(
        dtype="BF16", shape=(3, 4), content=bytes(range(24)), cuts=((1,), ())
    ),
    "model.count": Whole(dtype="I64", shape=(), content=b"\7" + bytes(7)),
    "model.empty": Whole(dtype="F32", shape=(0, 4), content=b""),
    "optimizer.state.layers.0.weight.exp_avg": A_WEIGHT,
}


def _read(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    content = path.read_bytes()
    tensors = {}
    head = read_head(lambda begin, end: content[begin:end], len(content))
    for name, rows in head.items():
        assert rows.begin % ELEMENT_BYTES[rows.dtype] == 0  # torch does not read it elsewhere
        of_tensor = content[rows.begin : rows.begin + rows.size_bytes]
        tensors[name] = rows.dtype, rows.shape, of_tensor
    return tensors


def test_the_model_alone_under_its_own_names(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "c")
    beside = tmp_path / "beside"
    beside.mkdir()
    for name in ("config.json", "tokenizer.json", "additional_chat_templates/tool.jinja"):
        (beside / name).parent.mkdir(exist_ok=True)
        (beside / name).write_text(name)
    saved = save(store, 5, TENSORS, ranks=6, tied={"model.head": "model.layers.0.weight"})
    done = export_weights(store, saved, tmp_path / "a" / "out", beside=beside)
    assert done == Exported(
        files=("model.safetensors",),
        compared=5,
        size_bytes=(tmp_path / "a" / "out" / "model.safetensors").stat().st_size,
        beside=("additional_chat_templates", "config.json", "tokenizer.json"),
    )
    assert _read(tmp_path / "a" / "out" / "model.safetensors") == {
        name.removeprefix("model."): (one.dtype, one.shape, one.content)
        for name, one in TENSORS.items()
        if name.startswith("model.")
    }
    assert (
        b'"__metadata__":{"format":"pt"}'
        in (tmp_path / "a" / "out" / "model.safetensors").read_bytes()
    )
    assert sorted(one.name for one in (tmp_path / "a").iterdir()) == ["out"]
    for name in ("config.json", "additional_chat_templates/tool.jinja"):
        assert (tmp_path / "a" / "out" / name).read_text() == name


LORA = {
    f"model.base_model.model.{name}": A_WEIGHT
    for name in (
        "model.embed_tokens.base_layer.weight",
        "model.embed_tokens.lora_embedding_A.default",
        "model.layers.0.q_proj.base_layer.weight",
        "model.layers.0.q_proj.lora_A.default.weight",
        "model.layers.0.norm.weight",
        "lm_head.original_module.weight",
        "lm_head.modules_to_save.default.weight",
        "default.weight",
    )
}


def test_of_lora_the_adapter_alone_under_the_names_of_peft(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "c")
    saved = save(store, 5, {**LORA, "optimizer.x": A_WEIGHT})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    done = export_weights(store, saved, tmp_path / "out", beside=tmp_path / "model")
    assert done == Exported(
        files=("adapter_model.safetensors",),
        compared=3,
        size_bytes=(tmp_path / "out" / "adapter_model.safetensors").stat().st_size,
        beside=("adapter_config.json",),
    )
    assert set(_read(tmp_path / "out" / "adapter_model.safetensors")) == {
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.q_proj.lora_A.weight",
        "base_model.model.lm_head.weight",
    }


def test_lora_without_its_config_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Next to a config.json, these names would give a model with random weights."""
    store = FolderStore(tmp_path / "c")
    saved = save(store, 5, LORA)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for beside in (None, tmp_path / "model"):
        with pytest.raises(Impossible) as refused:
            export_weights(store, saved, tmp_path / "out", beside=beside)
        assert str(refused.value).replace(saved.name, "NAME") == snapshot(name="refusal")
        assert not (tmp_path / "out").exists()
    done = export_weights(store, saved, tmp_path / "out", as_it_is=True)  # a model of the user's
    assert done.files == ("model.safetensors",)
    assert done.compared == len(LORA)


def test_an_export_that_is_found_wrong_leaves_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "c")
    seen = []

    def refuse(folder: Path) -> None:
        seen.append(sorted(one.name for one in folder.iterdir()))
        raise MusterError("it is wrong")

    with pytest.raises(MusterError, match="it is wrong"):
        export_weights(store, save(store, 5), tmp_path / "out", finish=refuse)
    assert seen == [["model.safetensors"]]
    assert [one.name for one in tmp_path.iterdir()] == ["c"]


def test_a_large_model_becomes_several_files_and_a_map(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "c")
    saved = save(store, 5, TENSORS, ranks=6)
    done = export_weights(store, saved, tmp_path / "out", most_in_a_file_bytes=35)
    assert done.files == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 67}
    read: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for file in done.files:
        content = _read(tmp_path / "out" / file)
        assert {one for one, place in index["weight_map"].items() if place == file} == set(content)
        read |= content
    assert read["layers.1.weight"] == ("BF16", (3, 4), bytes(range(24)))
    assert len(read) == 5


def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    store = FolderStore(tmp_path / "c")
    good = save(store, 5)
    without = save(store, 6, {"optimizer.x": A_WEIGHT})
    with pytest.raises(Impossible) as refused:
        export_weights(store, without, tmp_path / "out")
    assert without.name in refused.value.what
    assert str(refused.value).replace(without.name, "NAME") == snapshot
    with pytest.raises(Impossible, match="already exists"):
        export_weights(store, good, tmp_path / "c")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 31}))
    with pytest.raises(Impossible, match=r"32 B, but 31 B"):
        export_weights(store, good, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    store = FolderStore(tmp_path / "c")
    saved = save(store, 5)

    def full(handle: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(MusterError) as refused:
        export_weights(store, saved, tmp_path / "out")
    assert str(tmp_path / "out") in refused.value.what
    assert refused.value.why == os.strerror(28)
    assert refused.value.fix == snapshot
    assert [one.name for one in tmp_path.iterdir()] == ["c"]


def test_only_one_tensor_is_in_memory(tmp_path: Path) -> None:
    """Five tensors of 8 MiB, their halves on two ranks."""
    store = FolderStore(tmp_path / "c")
    names = [f"layer{number}" for number in range(5)]
    half = b"A" * 4 * MiB
    parts = [
        [Part(f"model.{name}", "F32", (rank * MiB, 0), (MiB, 1), half) for name in names]
        for rank in range(2)
    ]
    state = {"model": dict.fromkeys(names)}
    saved = commit_checkpoint(store, write_parts(store, 1, parts, state=state))
    tracemalloc.start()
    try:
        done = export_weights(store, saved, tmp_path / "out")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done.size_bytes > 40 * MiB
    assert peak_bytes < 25 * MiB
    tensors = _read(tmp_path / "out" / "model.safetensors")
    assert tensors["layer4"][2] == b"A" * 8 * MiB
