"""LoRA and QLoRA on real ranks: exact steps, small checkpoints, adapters that peft loads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs import lora_runs
from rank_programs.lora_runs import FORMER, Part
from torchmuster.checkpoints.manifest import committed_manifests
from torchmuster.checkpoints.store import FolderStore

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

USUAL = {
    "model.model_name_or_path": "qwen",
    "model.lora": "{r: 4}",
    "data.files": "*.txt",
    "data.sequence_length": "32",
    "train.steps": "4",
    "train.global_batch_size": "8",
    "train.micro_batch_size": "2",
    "train.learning_rate": "1e-2",
    "train.log_every": "1",
    "checkpoint.every": "2",
}
DDP, FSDP = {"distributed.strategy": "ddp"}, {"distributed.strategy": "fsdp"}
LINEAR = {"model.lora": "{r: 4, target_modules: all-linear}"}
WHOLE = {"model.lora": "{r: 4, modules_to_save: [lm_head, norm]}"}
QLORA = {"model.load_in_4bit": "true"}
DROPOUT = {"model.lora": "{r: 4, lora_dropout: 0.1}"}
DROPOUT_LINEAR = {"model.lora": "{r: 4, lora_dropout: 0.1, target_modules: all-linear}"}
DROPOUT_WHOLE = {"model.lora": "{r: 4, lora_dropout: 0.1, modules_to_save: [lm_head, norm]}"}
HALF = {"train.steps": "2"}
RUNS: Mapping[str, Mapping[str, str]] = {
    "lora": {**USUAL, **FSDP},
    "linear": {**USUAL, **LINEAR, **DDP},
    "linear-fsdp": {**USUAL, **LINEAR, **FSDP},
    "whole": {**USUAL, **WHOLE, **DDP},
    "whole-fsdp": {**USUAL, **WHOLE, **FSDP},
    "qlora": {**USUAL, **QLORA, **DDP, "train.activation_checkpointing": "full"},
    "qlora-fsdp": {**USUAL, **QLORA, **FSDP},
    "qlinear": {**USUAL, **QLORA, **LINEAR, **DDP},
    "qwhole": {**USUAL, **QLORA, **WHOLE, **DDP},
}
RESUMED: Mapping[str, Mapping[str, str]] = {
    "dropped": {**USUAL, **DROPOUT_WHOLE, **DDP},
    "dropped-fsdp": {**USUAL, **DROPOUT_LINEAR, **FSDP},
    "dropped-qlora": {**USUAL, **DROPOUT, **QLORA, **DDP},
    "dropped-qlora-fsdp": {**USUAL, **DROPOUT, **QLORA, **FSDP},
}
BF16 = {**USUAL, **WHOLE, "model.torch_dtype": "bfloat16"}
PARTS: list[Part] = [
    *RUNS.items(),
    *RESUMED.items(),
    *((f"{name}-in-parts", {**one, **HALF}) for name, one in RESUMED.items()),
    *((f"{name}-in-parts", one) for name, one in RESUMED.items()),
    ("former", {**USUAL, **HALF, **FSDP, FORMER: "yes"}),
    ("former", {**USUAL, **FSDP}),
    ("moved-about", {**USUAL, **HALF, **DDP}),
    ("moved-about", {**USUAL, **DDP, "model.model_name_or_path": "other"}),
    ("moved-about", {**USUAL, **DDP, "model.torch_dtype": "bfloat16"}),
    ("moved-about", {**USUAL, **DDP, **QLORA}),
    ("moved-about", {**USUAL, **FSDP, "model.model_name_or_path": "moved"}),
    ("bf16-ddp", {**BF16, **DDP}),
    ("bf16-fsdp", {**BF16, **FSDP}),
    ("refused", {**USUAL, **QLORA, **DDP, "model.lora": "{r: 4, modules_to_save: [o_proj]}"}),
    ("refused", {**USUAL, **DDP, "model.lora": "{r: 4, modules_to_save: [o_prj]}"}),
]


@dataclass(frozen=True)
class Trained:
    """Where the trainings are, and what each part answered, in the order of ``PARTS``."""

    folder: Path
    answers: list[tuple[str, dict[str, Any]]]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [answer for one, answer in self.answers if one == name]

    def newest(self, name: str) -> tuple[set[str], dict[str, Any]]:
        """Return the names of the model's tensors in the newest checkpoint, and its state."""
        store = FolderStore(self.folder / name / "checkpoints")
        manifest = committed_manifests(store)[0]
        names = set()
        for file in manifest.files:
            with safe_open(store.folder / manifest.name / file, "pt") as opened:
                names |= set(opened.keys())
        return {one for one in names if one.startswith("model.")}, manifest.state


@pytest.fixture(scope="module")
def trained(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("lora-runs")
    answers, _ = run_ranks(lora_runs.train, 2, str(folder), PARTS, {})[0]
    return Trained(folder, [(name, one) for (name, _), one in zip(PARTS, answers, strict=True)])


def test_two_ranks_train_next_to_shards_in_4_bits_and_peft_loads_the_adapter(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    final = str(tmp_path / "qlora" / "checkpoints" / "final")
    parts = [("qlora", RUNS["qlora-fsdp"])]
    for answers, loaded in run_ranks(lora_runs.train, 2, str(tmp_path), parts, {final: True}):
        assert answers[0]["losses"][-1] < answers[0]["losses"][0]
        assert torch.equal(loaded[final], answers[0]["logits"])


@pytest.mark.nightly
def test_one_process_computes_the_same_and_peft_loads_exactly_what_was_trained(
    run_ranks: RunRanks, trained: Trained
) -> None:
    alone = {"distributed.strategy": "auto", "train.micro_batch_size": "8"}
    parts = [(f"{name}-alone", {**settings, **alone}) for name, settings in RUNS.items()]
    finals = {name: str(trained.folder / name / "checkpoints" / "final") for name in RUNS}
    asked = {final: "load_in_4bit" in str(RUNS[name]) for name, final in finals.items()}
    ((answers, loaded),) = run_ranks(lora_runs.train, 1, str(trained.folder), parts, asked)
    for name, single in zip(RUNS, answers, strict=True):
        (of_ranks,) = trained.of(name)
        assert len(single["losses"]) == 4
        assert of_ranks["losses"] == pytest.approx(single["losses"], abs=1e-5), name
        torch.testing.assert_close(of_ranks["logits"], single["logits"], atol=1e-4, rtol=1e-4)
        assert torch.equal(loaded[finals[name]], of_ranks["logits"]), name


@pytest.mark.nightly
def test_a_checkpoint_holds_only_what_is_trained_and_names_its_base(trained: Trained) -> None:
    for name, settings in RUNS.items():
        names, state = trained.newest(name)
        assert all(".lora_" in one or ".modules_to_save." in one for one in names), name
        copies = any(".modules_to_save." in one for one in names)
        assert copies == ("lora_modules" in str(settings)), name
        base = state["base"]
        assert base["name"] == str(trained.folder / "qwen")
        assert base["dtype"] == ("nf4" if "load_in_4bit" in str(settings) else "float32")
        assert len(base["sha256"]) == 64


@pytest.mark.nightly
def test_a_resumed_run_is_bitwise_the_one_that_never_stopped(trained: Trained) -> None:
    for name in RESUMED:
        (straight,) = trained.of(name)
        half, whole = trained.of(f"{name}-in-parts")
        assert half["final"] != whole["final"]
        assert whole["final"] == straight["final"], name
        assert whole["losses"] == straight["losses"], name


@pytest.mark.nightly
def test_another_base_is_refused_and_the_same_elsewhere_is_not(
    trained: Trained, snapshot: SnapshotAssertion
) -> None:
    _, other, bf16, in_4_bits, moved = trained.of("moved-about")
    for refusal in (other, bf16, in_4_bits):
        assert "step-00000002" in refusal["what"]
    assert str(trained.folder / "other") in other["why"]
    assert "load_in_4bit" in bf16["fix"]
    assert in_4_bits["fix"] == bf16["fix"]
    (straight,) = trained.of("lora")
    assert moved["losses"] == pytest.approx(straight["losses"], abs=1e-5)


@pytest.mark.nightly
def test_layers_that_cannot_be_trained_whole_are_refused(trained: Trained) -> None:
    quantized, unknown = trained.of("refused")
    assert "o_proj" in quantized["what"]
    assert "target_modules" in quantized["fix"]
    assert "o_prj" in unknown["what"]
    assert "o_proj" in unknown["why"]
