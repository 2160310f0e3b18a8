"""The final weights of a run and the exports of its checkpoints are checked against the trained model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import tiny_models
from nightly import nightly_except
from rank_group import RunRanks
from rank_programs import proven_exports
from torchmuster.checkpoints.export import MERGED

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
    assert result.unchecked == ""
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
