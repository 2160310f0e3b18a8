"""Every recipe trains as it is, on a tiny model: only the model, the data and the sizes are replaced."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

import tiny_models
from rank_group import RunRanks
from rank_programs import from_settings
from torchmuster.cli.config import recipes
from torchmuster.runfolder import create_run_folder

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

SMALL = {
    "train.global_batch_size": "4",
    "train.micro_batch_size": "2",
    "train.log_every": "1",
    "train.learning_rate": "1e-2",
}
TEXT = {"model.model_name_or_path": "model", "data.files": "train.jsonl"}
REPLACED: Mapping[str, Mapping[str, str]] = {
    "pretrain": {**TEXT, "train.steps": "6", "data.sequence_length": "64"},
    "sft": {**TEXT, "train.epochs": "2", "data.sequence_length": "64"},
    "sft-lora": {**TEXT, "train.epochs": "2", "data.sequence_length": "64"},
    "qlora": {**TEXT, "train.epochs": "2", "data.sequence_length": "64"},
    "images": {
        "model.model_name_or_path": "vit",
        "data.images": "images",
        "data.workers": "0",
        "train.epochs": "2",
    },
}


def write_data(folder: Path) -> None:
    random.seed(3)
    records = [
        {
            "messages": [
                {"role": "user", "content": f"{one} foxes?"},
                {"role": "assistant", "content": random.choice(tiny_models.LINES)},
            ],
            "text": random.choice(tiny_models.LINES),
        }
        for one in range(24)
    ]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(one) for one in records))


@pytest.mark.parametrize("name", REPLACED)
def test_a_recipe_trains(name: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    assert set(REPLACED) == set(recipes())
    if name == "images":
        tiny_models.make_images(tmp_path / "images", each=8)
        tiny_models.make_architecture(tmp_path / "vit", "vit")
    else:
        write_data(tmp_path)
        tiny_models.make_model(tmp_path / "model", "byte-level")
    (tmp_path / "recipe.yaml").write_text(recipes()[name])
    run = create_run_folder(tmp_path / "runs", name)
    run_ranks(
        from_settings.train_file,
        1 if name == "qlora" else 2,
        str(tmp_path),
        "recipe.yaml",
        {**SMALL, **REPLACED[name]},
        str(run.path),
    )
    steps = [json.loads(one) for one in (run.metrics / "steps.jsonl").read_text().splitlines()]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (run.checkpoints / "final").is_dir()
