"""What settings mean for a run, on two real ranks: the same curve whichever way the model is spread."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from rank_group import RunRanks
from rank_programs.from_settings import train_all

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

TINY = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROWS = {
    "data.tokenizer": "bytes",
    "data.sequence_length": "32",
    "train.steps": "8",
    "train.global_batch_size": "8",
    "train.learning_rate": "1e-2",
    "train.log_every": "1",
}
TEXT = {**ROWS, "data.files": "*.txt"}
QWEN = {**TEXT, "model.model_name_or_path": "qwen"}
QWEN16 = {**TEXT, "model.model_name_or_path": "qwen16", "train.steps": "1"}
DDP = {"distributed.strategy": "ddp"}
FSDP = {"distributed.strategy": "fsdp"}
# Begins with what the first run left, which has to be there before.
LORA = {
    **TEXT,
    "model.model_name_or_path": "qwen-ddp/checkpoints/final",
    "model.lora": "{r: 4}",
    "train.activation_checkpointing": "selective",
    "train.clip_norm": "1",
    "train.steps": "4",
}
RUNS: Mapping[str, Mapping[str, str]] = {
    "qwen-ddp": {**QWEN, **DDP},
    "qwen-fsdp": {**QWEN, **FSDP},
    "accumulating": {**QWEN, **DDP, "train.micro_batch_size": "2"},
    "hybrid": {
        **QWEN,
        **FSDP,
        "distributed.fsdp_sharding_strategy": "hybrid_shard",
    },
    "recomputing": {
        **QWEN,
        **FSDP,
        "distributed.fsdp_cpu_offload": "true",
        "train.activation_checkpointing": "1",
    },
    "bf16": {**QWEN, **FSDP, "train.precision": "bf16"},
    "fp16": {**QWEN, **DDP, "train.precision": "fp16"},
    "bf16-weights": {**QWEN16, **DDP, "model.torch_dtype": "auto"},
    "whole-weights": {**QWEN16, **DDP},
    "lora-ddp": {**LORA, **DDP},
    "lora-fsdp": {**LORA, **FSDP, "distributed.fsdp_sharding_strategy": "shard_grad_op"},
    "own-ddp": {
        **DDP,
        "distributed.find_unused_parameters": "true",
        "model.build": "own_of_settings:model",
        "data.dataset": "own_of_settings:data",
        "data.evaluation": "own_of_settings:data",
        "train.epochs": "3",
        "train.learning_rate": "0.1",
        "train.optimizer": "sgd",
        "train.schedule": "cosine",
        "train.warmup": "2",
        "train.log_every": "1",
    },
    "rows-of-a-dataset": {
        **ROWS,
        "model.model_name_or_path": "qwen",
        "data.hugging_face": "dataset",
        "data.columns": "{text: words}",
        "data.pack": "false",
        "data.evaluation": "test",
        "train.steps": "2",
    },
}
OWN = """\
import torch
from torch import nn

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3), nn.Linear(3, 3))

    def forward(self, inputs):
        return self[2](self[1](self[0](inputs)))  # the last layer is never used

def model():
    return Model()

def data():
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.argmax(1) % 3)
"""


def make_folder(folder: Path) -> None:
    (folder / "qwen").mkdir()
    config = {"model_type": "qwen2", "tie_word_embeddings": True, **TINY}
    (folder / "qwen" / "config.json").write_text(json.dumps(config))
    (folder / "qwen16").mkdir()
    (folder / "qwen16" / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    (folder / "own_of_settings.py").write_text(OWN)
    lines = [f"{number} foxes jump over {number + 1} dogs" for number in range(120)]
    (folder / "a.txt").write_text("\n".join(lines))
    (folder / "dataset").mkdir()
    records = [json.dumps({"words": line, "number": 1}) for line in lines[:40]]
    (folder / "dataset" / "train.jsonl").write_text("\n".join(records))
    (folder / "dataset" / "test.jsonl").write_text("\n".join(records[:8]))


@pytest.fixture(scope="module")
def trained(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all runs in one group; return the folder that has them."""
    folder = tmp_path_factory.mktemp("from-settings")
    make_folder(folder)
    curves, others = run_ranks(train_all, 2, str(folder), RUNS)
    assert curves == others
    (folder / "curves.json").write_text(json.dumps(curves))
    return folder


@pytest.fixture(scope="module")
def curves(trained: Path) -> dict[str, list[float]]:
    return json.loads((trained / "curves.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.nightly
def test_the_loss_falls_and_is_the_same_for_ddp_and_fsdp(curves: dict[str, list[float]]) -> None:
    assert len(curves["qwen-ddp"]) == 8
    assert curves["qwen-ddp"][-1] < 0.7 * curves["qwen-ddp"][0]
    assert curves["qwen-fsdp"] == pytest.approx(curves["qwen-ddp"], abs=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["accumulating", "hybrid", "recomputing"])
def test_how_a_step_is_cut_changes_nothing(name: str, curves: dict[str, list[float]]) -> None:
    assert curves[name] == pytest.approx(curves["qwen-ddp"], abs=1e-4)


@pytest.mark.nightly
def test_number_types_are_those_asked_for(trained: Path, curves: dict[str, list[float]]) -> None:
    from safetensors import safe_open

    assert curves["bf16"] != curves["qwen-ddp"]
    assert curves["bf16"] == pytest.approx(curves["qwen-ddp"], rel=0.05)
    # Its first steps look for a loss scale, and change nothing.
    fp16 = [loss for loss in curves["fp16"] if loss is not None]
    assert fp16 != curves["qwen-ddp"][: len(fp16)]
    assert len(fp16) >= 2
    assert fp16 == pytest.approx(curves["qwen-ddp"][: len(fp16)], rel=0.05)
    for name, number_type in (("bf16", "F32"), ("bf16-weights", "BF16"), ("whole-weights", "F32")):
        with safe_open(trained / name / "checkpoints/final/model.safetensors", "pt") as file:
            types = {file.get_slice(one).get_dtype() for one in file.keys()}  # noqa: SIM118
        assert types == {number_type}


def test_what_one_run_leaves_another_goes_on_from(
    trained: Path, curves: dict[str, list[float]]
) -> None:
    final = trained / "qwen-ddp" / "checkpoints" / "final"
    assert sorted(one.name for one in final.iterdir()) == ["config.json", "model.safetensors"]
    assert curves["lora-ddp"][0] < curves["qwen-ddp"][-1] * 1.05  # it begins where that one ended
    assert curves["lora-fsdp"] == pytest.approx(curves["lora-ddp"], abs=1e-5)


def test_lora_leaves_its_small_matrices_only(trained: Path) -> None:
    from safetensors import safe_open

    for name in ("lora-ddp", "lora-fsdp"):
        final = trained / name / "checkpoints" / "final"
        assert sorted(one.name for one in final.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        with safe_open(final / "adapter_model.safetensors", "pt") as file:
            shapes = {
                one.rpartition("self_attn.")[2]: file.get_slice(one).get_shape()
                for one in file.keys()  # noqa: SIM118
            }
        assert shapes["q_proj.lora_A.weight"] == [4, 32]
        assert shapes["v_proj.lora_B.weight"] == [16, 4]
        assert set(shapes) == {f"{p}_proj.lora_{m}.weight" for p in "qv" for m in "AB"}


def test_a_model_and_data_of_ones_own(trained: Path, curves: dict[str, list[float]]) -> None:
    assert len(curves["own-ddp"]) == 3 * 4  # 60 samples, 8 on each of 2 ranks
    lines = (trained / "own-ddp" / "metrics" / "steps.jsonl").read_text().splitlines()
    rates = [json.loads(line)["learning_rate"] for line in lines]
    assert rates[:3] == pytest.approx([0.05, 0.1, 0.1])
    assert rates[-1] < 0.01
    evaluations = (trained / "own-ddp" / "metrics" / "evaluations.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in evaluations]
    assert len(losses) == 3  # one after each epoch
    assert losses[2] < losses[0]


def test_a_dataset_of_hugging_face(trained: Path, curves: dict[str, list[float]]) -> None:
    assert len(curves["rows-of-a-dataset"]) == 2
    evaluations = trained / "rows-of-a-dataset" / "metrics" / "evaluations.jsonl"
    assert [json.loads(one)["step"] for one in evaluations.read_text().splitlines()] == [2]
