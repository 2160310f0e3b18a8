"""Models by folder or name, without a network: built from config.json, loaded from safetensors, or refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchmuster.errors import Impossible
from torchmuster.train.models import hugging_face
from torchmuster.train.models.factory import ModelRecipe

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers")]

TINY = {
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def folder(path: Path, **config: object) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY | config))
    return str(path)


def test_a_folder_with_only_a_config_is_built(tmp_path: Path) -> None:
    for kind, name in (("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM")):
        files = hugging_face.find_model(folder(tmp_path / kind, model_type=kind))
        assert files.weights == ()
        model: Any = hugging_face.build_model(files)
        assert type(model).__name__ == name
        assert model.training
        assert model.config._attn_implementation == "sdpa"
        assert model.config.use_cache is False
        assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_weights_come_back(tmp_path: Path) -> None:
    built: Any = hugging_face.build_model(
        hugging_face.find_model(folder(tmp_path / "m", model_type="qwen2"))
    )
    built.save_pretrained(tmp_path / "saved", max_shard_size="5KB")
    files = hugging_face.find_model(str(tmp_path / "saved"))
    assert len(files.weights) > 1
    loaded = hugging_face.load_model(files)
    assert all(
        torch.equal(one, other)
        for one, other in zip(built.parameters(), loaded.parameters(), strict=True)
    )
    files.weights[0].unlink()
    with pytest.raises(Impossible) as refused:
        hugging_face.load_model(files)
    assert files.weights[0].name in refused.value.why


def test_others_find_a_model_by_its_absolute_path_or_by_its_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder(tmp_path / "m", model_type="llama")
    found = hugging_face.find_model("m")
    assert (found.name, found.revision) == (str(tmp_path / "m"), None)
    # As huggingface_hub keeps what it has fetched.
    revision = "0123456789abcdef0123456789abcdef01234567"
    kept = tmp_path / "hub" / "models--owner--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(revision)
    (kept / "snapshots").mkdir()
    folder(kept / "snapshots" / revision, model_type="llama")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    found = hugging_face.find_model("owner/name")
    assert (found.name, found.revision) == ("owner/name", revision)
    assert found.folder.name == revision


def test_a_model_that_is_neither_here_nor_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Impossible, match=r"'\./nowhere'"):
        hugging_face.find_model("./nowhere")
    with pytest.raises(Impossible) as error:
        hugging_face.find_model("owner/name")
    assert "'owner/name'" in error.value.what
    assert "hf download owner/name --local-dir FOLDER" in error.value.fix


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder(tmp_path / "m", model_type="llama")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(Impossible, match=r"pytorch_model\.bin"):
        hugging_face.find_model(str(tmp_path / "m"))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "nonesuch"},
        {},
        {"model_type": "vit"},
        {"model_type": "own", "auto_map": {"AutoConfig": "code.py"}},
    ],
)
def test_a_config_that_transformers_cannot_build(config: dict[str, object], tmp_path: Path) -> None:
    files = hugging_face.find_model(folder(tmp_path / "m", **config))
    with pytest.raises(Impossible) as error:
        hugging_face.build_model(files)
    assert str(tmp_path / "m") in error.value.what
    assert "module:function" in error.value.fix


def test_an_error_without_text_is_named_by_its_class() -> None:
    with pytest.raises(Impossible) as error, hugging_face.loading("it", "fix it"):
        raise ValueError
    assert (error.value.what, error.value.why) == ("cannot load it", "ValueError")


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = hugging_face.find_model(folder(tmp_path / "m", model_type="llama"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Impossible) as error:
        hugging_face.build_model(files)
    assert error.value.fix == "pip install 'torchmuster[transformers]'"


@pytest.mark.parametrize(
    ("kind", "named", "auto", "loss"),
    [
        ("llama", None, "AutoModelForCausalLM", "language_model"),
        ("llama", "LlamaModel", "AutoModelForCausalLM", "language_model"),
        ("gpt2", "GPT2LMHeadModel", "AutoModelForCausalLM", "language_model"),
        ("bert", "BertForMaskedLM", "AutoModelForMaskedLM", "classification"),
        (
            "bert",
            "BertForSequenceClassification",
            "AutoModelForSequenceClassification",
            "classification",
        ),
        ("vit", "ViTForImageClassification", "AutoModelForImageClassification", "classification"),
    ],
)
def test_the_class_follows_from_architectures(
    tmp_path: Path, kind: str, named: str | None, auto: str, loss: str
) -> None:
    architectures = {} if named is None else {"architectures": [named]}
    files = hugging_face.find_model(folder(tmp_path / "m", model_type=kind, **architectures))
    chosen = hugging_face.model_class(files)
    assert (chosen.value.auto, chosen.value.loss) == (auto, loss)
    assert (named or "no architectures") in chosen.reason
    model = hugging_face.build_model(files)
    assert type(model).__name__ == {None: "LlamaForCausalLM", "LlamaModel": "LlamaForCausalLM"}.get(
        named, named
    )


def test_the_written_config_has_class_dtype_and_labels(tmp_path: Path) -> None:
    files = hugging_face.find_model(
        folder(tmp_path / "m", model_type="vit", torch_dtype="bfloat16")
    )
    labels = ("cats", "dogs", "eels")
    model = hugging_face.build_model(files, dtype="float32", labels=labels)
    (tmp_path / "out").mkdir()
    hugging_face.save_configs(files, tmp_path / "out", model, labels=labels)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["ViTForImageClassification"]
    assert written["dtype"] == "float32"
    assert "torch_dtype" not in written
    assert written["id2label"] == {"0": "cats", "1": "dogs", "2": "eels"}
    assert written["label2id"] == {"cats": 0, "dogs": 1, "eels": 2}


def test_a_head_of_other_classes_is_replaced_and_reported(tmp_path: Path) -> None:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        id2label={0: "a", 1: "b"},
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "classes")
    transformers.ViTModel(config).save_pretrained(tmp_path / "bare")
    files = hugging_face.find_model(str(tmp_path / "classes"))
    three = ("cats", "dogs", "eels")
    assert hugging_face.new_head(files, ("a", "b")) == ""
    assert "2 classes" in hugging_face.new_head(files, three)
    bare = hugging_face.find_model(str(tmp_path / "bare"))
    assert "ViTModel" in hugging_face.new_head(bare, three)
    heads = []
    for source, seed in ((files, 1), (files, 1), (files, 2), (bare, 1)):
        torch.manual_seed(seed)
        model: Any = hugging_face.load_model(source, labels=three)
        heads.append(model.classifier.weight.detach())
        assert heads[-1].shape == (3, 16)
    assert heads[0].equal(heads[1])
    assert not heads[0].equal(heads[2])
    with pytest.raises(Impossible):  # LoRA would freeze the random head
        ModelRecipe(files=files, lora={"r": 2}, labels=three).check()
