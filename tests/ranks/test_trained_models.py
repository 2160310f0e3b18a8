"""What a training leaves, and what is exported from its checkpoints, is the model that was trained."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import tiny_models
from nightly import nightly_except
from rank_group import RunRanks
from rank_programs import trained_models
from torchmuster.checkpoints.export import ExportRequest, run_exporter
from torchmuster.checkpoints.manifest import committed_manifests
from torchmuster.checkpoints.store import FolderStore
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.written import settings_yaml
from torchmuster.runfolder import RunFolder, create_run_folder

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

MODELS: Mapping[str, Mapping[str, object]] = {
    "byte-level": {"tokenizer": "byte-level"},
    "word-piece": {"tokenizer": "word-piece", "tie_word_embeddings": False},
    "sentence-piece": {"tokenizer": "sentence-piece"},
}
USUAL = {
    "data.files": "*.txt",
    "data.sequence_length": "32",
    "train.steps": "4",
    "train.global_batch_size": "8",
    "train.learning_rate": "1e-2",
    "checkpoint.every": "2",
}
LORA = {"model.lora": "{r: 4, lora_alpha: 24}"}
DDP, FSDP = {"distributed.strategy": "ddp"}, {"distributed.strategy": "fsdp"}
RUNS: Mapping[str, Mapping[str, str]] = {
    "full-ddp": {"model.model_name_or_path": "byte-level", **DDP},
    # Trained on bytes, it still has the tokenizer that its folder came with.
    "full-fsdp": {"model.model_name_or_path": "word-piece", "data.tokenizer": "bytes", **FSDP},
    "lora-ddp": {"model.model_name_or_path": "byte-level", **LORA, **DDP},
    "lora-fsdp": {"model.model_name_or_path": "word-piece", **LORA, **FSDP},
    "lora-embedding": {
        "model.model_name_or_path": "sentence-piece",
        "model.lora": "{r: 2, target_modules: [embed_tokens, o_proj]}",
        **DDP,
    },
}
LORA_RUNS = [name for name in RUNS if name.startswith("lora")]


@dataclass(frozen=True)
class Trained:
    """The runs, and the logits that each trained model gave."""

    folder: Path
    runs: Mapping[str, RunFolder]
    logits: Mapping[str, torch.Tensor]

    def final(self, run: str) -> Path:
        return self.runs[run].checkpoints / "final"

    def source(self, run: str) -> Path:
        return self.folder / RUNS[run]["model.model_name_or_path"]


@pytest.fixture(scope="module")
def trained(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained-models")
    (folder / "a.txt").write_text("\n".join(tiny_models.LINES))
    runs, wanted = {}, {}
    for name, settings in RUNS.items():
        flags = {**USUAL, **settings}
        resolved = resolve_settings(
            flags=[Flag(flag="--set", path=k, text=v) for k, v in flags.items()]
        )
        runs[name] = create_run_folder(folder / "runs", name)
        runs[name].config.write_text(settings_yaml(resolved))
        wanted[name] = (str(runs[name].path), flags)
    logits, _ = run_ranks(trained_models.make_and_train, 2, str(folder), MODELS, wanted)
    return Trained(folder=folder, runs=runs, logits=logits)


@pytest.fixture(scope="module")
def exported(trained: Trained) -> Mapping[str, Path]:
    """The newest checkpoint of each run, exported by the function that the command calls."""
    folders = {}
    for name, run in trained.runs.items():
        store = FolderStore(run.checkpoints)
        folders[name] = trained.folder / "exported" / name
        checkpoint = store.folder / committed_manifests(store)[0].name
        run_exporter(
            ExportRequest(
                checkpoint=str(checkpoint), folder=str(folders[name]), beside=str(run.model)
            )
        )
    return folders


def assert_equal(loaded: Mapping[str, torch.Tensor], trained: torch.Tensor, *, lora: bool) -> None:
    assert set(loaded) == {"transformers", *(("peft", "on a base") if lora else ())}
    for how, logits in loaded.items():
        torch.testing.assert_close(logits, trained, rtol=1e-5, atol=1e-5, msg=how)


def test_an_export_is_the_trained_model(
    trained: Trained, exported: Mapping[str, Path], run_ranks: RunRanks
) -> None:
    for run, folder in exported.items():
        names = {one.name for one in folder.iterdir()}
        assert names == {one.name for one in trained.final(run).iterdir()}
        assert ("config.json" in names) == (run not in LORA_RUNS)
        assert ("adapter_config.json" in names) == (run in LORA_RUNS)
    (loaded,) = run_ranks(trained_models.load, 1, {one: str(exported[one]) for one in RUNS})
    for run, logits in loaded.items():
        assert_equal(logits, trained.logits[run], lora=run in LORA_RUNS)


@pytest.mark.parametrize(
    "run", nightly_except([run for run in RUNS if run != "full-ddp"], {run: run for run in RUNS})
)
def test_tokenizer_and_generation_files_come_along(
    run: str, trained: Trained, exported: Mapping[str, Path], run_ranks: RunRanks
) -> None:
    source = trained.source(run)
    folders = {"final": trained.final(run), "export": exported[run]}
    for folder in folders.values():
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation["temperature"] == 0.5
    paths = {name: str(folder) for name, folder in {"source": source, **folders}.items()}
    (made,) = run_ranks(trained_models.tokenize, 1, paths)
    assert made["final"] == made["export"] == made["source"]
    assert (made["final"]["chat"] is not None) == (source.name == "byte-level")


def test_an_adapter_names_its_base_model_wherever_it_is_loaded(trained: Trained) -> None:
    described = json.loads((trained.final("lora-ddp") / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(trained.source("lora-ddp"))
