"""The final weights of a run and the exports of its checkpoints are checked against the trained model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import tiny_models
from muster_command import Muster
from nightly import nightly_except
from rank_group import RunRanks
from rank_programs import proven_exports
from torchmuster.checkpoints.export_check import MERGED

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

USUAL = {
    "train.steps": "2",
    "train.global_batch_size": "4",
    "train.learning_rate": "1e-2",
}
TEXT = {"data.files": "a.txt", "data.tokenizer": "bytes", "data.sequence_length": "16"}
DATA: Mapping[str, Mapping[str, str]] = {
    "bert": {"data.dataset": "masked_rows:rows"},
    "vit": {"data.images": "pics", "data.evaluation": "pics"},
}
Exports: TypeAlias = Mapping[str, Mapping[str, Any]]  # by name, how each is made
# These are sharded; the others are copied to each rank.
SHARDED = ("llama", "gpt2", "bert")


def prove(
    run_ranks: RunRanks,
    folder: Path,
    kind: str,
    *,
    settings: Mapping[str, str] | None = None,
    exports: Exports | None = None,
    fresh: bool = False,
    damage_final: str = "",
) -> dict[str, Any]:
    strategy = {"distributed.strategy": "fsdp" if kind in SHARDED else "ddp"}
    wanted = {"model.model_name_or_path": f"./{kind}", **USUAL, **DATA.get(kind, TEXT)}
    facts, _ = run_ranks(
        proven_exports.train_and_prove,
        2,
        str(folder),
        kind,
        {**wanted, **strategy, **(settings or {})},
        exports or {},
        fresh,
        damage_final,
    )
    return facts


def assert_checked(result: Any) -> None:
    assert not isinstance(result, str), result
    assert (result.unchecked, result.difference) == ("", None)


def assert_same_logits(result: Any, limit: float) -> None:
    assert not isinstance(result, str), result
    assert (result.unchecked, result.limit) == ("", limit)
    assert result.difference is not None
    assert result.difference <= limit


@pytest.mark.parametrize(
    "kind", nightly_except(["llama", "vit"], {kind: kind for kind in tiny_models.ARCHITECTURES})
)
def test_final_and_exports_are_checked(kind: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    exports: Exports = {
        "whole": {},
        "parts": {"most_in_a_file_bytes": 3000},
    }
    facts = prove(run_ranks, tmp_path, kind, exports=exports, fresh=kind != "vit")
    assert "error" not in facts
    assert facts["final"].unchecked == ""
    for name in exports:
        assert_checked(facts[name])
    final = tmp_path / "run" / "checkpoints" / "final"
    written = json.loads((final / "config.json").read_text())
    assert written["dtype"] == "float32"
    named, _ = tiny_models.ARCHITECTURES[kind]
    assert written["architectures"] == ["ViTForImageClassification" if kind == "vit" else named]
    assert (tmp_path / "parts" / "model.safetensors.index.json").is_file()
    if kind == "vit":
        assert list(written["id2label"].values()) == list(tiny_models.CLASSES)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_adapters_are_checked_alone_and_merged(
    strategy: str, run_ranks: RunRanks, tmp_path: Path
) -> None:
    settings = {"model.lora": "{r: 4}", "distributed.strategy": strategy}
    exports: Exports = {
        "adapter": {},
        "merged": {"merge": True},
    }
    facts = prove(run_ranks, tmp_path, "llama", settings=settings, exports=exports)
    assert "error" not in facts
    assert facts["final"].unchecked == ""
    assert_checked(facts["adapter"])
    assert_same_logits(facts["merged"], MERGED)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.nightly
def test_weights_in_16_bits_are_checked(run_ranks: RunRanks, tmp_path: Path) -> None:
    settings = {"model.torch_dtype": "bfloat16"}
    facts = prove(run_ranks, tmp_path, "mistral", settings=settings, exports={"same": {}})
    assert_checked(facts["same"])
    config = json.loads((tmp_path / "same" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


@pytest.mark.nightly
def test_damage_between_writing_and_checking_is_an_error(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    exports: Exports = {
        "config": {"damage": "config intermediate_size 4"},
        "good": {},
    }
    facts = prove(
        run_ranks, tmp_path, "llama", exports=exports, damage_final="tensor lm_head.weight"
    )
    assert "lm_head.weight" in facts["error"]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert not (checkpoints / "final").exists()
    assert (checkpoints / "final-failed-check" / "model.safetensors").is_file()
    assert "of another shape" in facts["config"]
    assert not (tmp_path / "config").exists()
    assert_checked(facts["good"])


@pytest.mark.nightly
def test_the_commands_prove_an_image_classifier(
    muster: Muster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without a head for these classes gets a new one, which is reported."""
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # a thread that would be left
    tiny_models.make_architecture(tmp_path / "vit", "vit")
    tiny_models.make_images(tmp_path / "pics")
    settings = {"model.model_name_or_path": "./vit", "data.images": "pics", **USUAL}
    flags = [text for path, value in settings.items() for text in ("--set", f"{path}={value}")]
    done = muster("train", *flags, "--device", "cpu", "--ranks", "1")
    assert done.code == 0, done.err
    assert "new head" in done.out
    assert "checked: " in done.out
    done = muster("checkpoint", "export", "--to", "out")
    assert done.code == 0, done.err
    assert "tensors equal to those of checkpoint" in done.out
    assert "AutoModelForImageClassification" in done.out
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    done = muster("checkpoint", "export", "--merge", "--to", "other")
    assert done.code == 2
    assert not (tmp_path / "other").exists()
