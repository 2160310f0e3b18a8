"""``muster train`` for real: a settings file, two ranks, and weights at the end; or one text that says why not."""

import json
import os
import re
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster, Result
from torchmuster.launch.history import run_state
from torchmuster.runfolder import RunFolder, list_runs

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

# Every key of the classic settings file, and what to train on.
CONFIG = """\
experiment_name: "tiny llama"
distributed:
  enabled: true
  num_gpus: 2
  gpu_ids: [0, 1]
  strategy: "ddp"
  fsdp_sharding_strategy: "full_shard"
  fsdp_cpu_offload: false
  master_port: null
model:
  model_name_or_path: llama
  device_map: "auto"
  torch_dtype: "float32"
data:
  files: "*.txt"
  tokenizer: bytes
  sequence_length: 48
train:
  steps: 6
  global_batch_size: 4
  learning_rate: 1e-2
  log_every: 1
"""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OWN = """\
import resource

import torch
from torch import nn

def model():
    return nn.Linear(4, 3)

def data():
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.argmax(1) % 3)

def too_much():
    resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))
    return torch.ones(2**34)
"""


@pytest.fixture
def folder(own_machine: Path) -> Path:
    (own_machine / "llama").mkdir()
    (own_machine / "llama" / "config.json").write_text(json.dumps(LLAMA))
    text = "\n".join(f"{number} foxes jump over {number + 1} dogs" for number in range(60))
    (own_machine / "a.txt").write_text(text)
    (own_machine / "config.yaml").write_text(CONFIG)
    (own_machine / "own.py").write_text(OWN)
    return own_machine


def train(muster: Muster, *words: str) -> Result:
    alone = {"HF_HUB_OFFLINE": "1", "COLUMNS": "300"}
    flags = ("--device", "cpu", "--ranks", "2", "--config", "config.yaml")
    return muster("train", *flags, *words, env=alone)


def losses(run: Path) -> list[float]:
    lines = (run / "metrics" / "steps.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.nightly
def test_a_model_from_its_config_trains_alike_under_ddp_and_fsdp(
    muster: Muster, folder: Path
) -> None:
    curves = []
    for strategy in ("ddp", "fsdp"):
        done = train(muster, "--set", f"distributed.strategy={strategy}")
        assert done.code == 0, done
        run = list_runs(folder / "runs")[0]
        assert f"strategy  {strategy}: requested" in done.out
        assert "batch     2 per rank x 2 ranks x 1 accumulation = 4 per step" in done.out
        final = run.path / "checkpoints" / "final"
        assert f"trained 6 steps, loss {losses(run.path)[-1]:.4g}; the weights are in {final}" in (
            done.out
        )
        assert sorted(one.name for one in final.iterdir()) == ["config.json", "model.safetensors"]
        assert "tiny-llama" in run.id
        assert f'  strategy: "{strategy}"  # --set distributed.strategy\n' in run.config.read_text()
        curves.append(losses(run.path))
        again = train(
            muster, "--config", str(run.config), "--dry-run"
        )  # what it left starts another
        assert again.code == 0, again
    ddp, fsdp = curves
    assert len(ddp) == 6
    assert ddp[-1] < 0.9 * ddp[0]
    assert fsdp == pytest.approx(ddp, abs=1e-5)


@pytest.mark.nightly
def test_what_only_ranks_can_find_out_is_told_as_it_is(
    muster: Muster, folder: Path, snapshot: SnapshotAssertion
) -> None:
    (folder / "config.yaml").write_text(
        "model: {build: 'own:model'}\ndata: {dataset: 'own:too_much'}\n"
    )
    done = train(muster)
    assert done.code == 1
    (told,) = [line for line in done.err.splitlines() if line.startswith("failure  ")]
    assert told.startswith(f"failure  rank 0 on {os.uname().nodename} (cpu) ")
    assert told.endswith(" 64.0 GiB")
    assert told.replace(f" on {os.uname().nodename} ", " on HOST ") == snapshot
    assert re.search(r"why  parameters +0 B\n +gradients +0 B\n", done.err)  # the table
    assert "Traceback" not in done.err + done.out
    state = run_state.read_state(RunFolder(list_runs(folder / "runs")[0].path))
    assert state is not None
    assert state.phase == "failed"


def test_what_needs_no_ranks_is_told_before_they_start(
    muster: Muster, folder: Path, snapshot: SnapshotAssertion
) -> None:
    (folder / "small").mkdir()
    described = {"model_type": "llama", "vocab_size": 257, "max_position_embeddings": 64}
    (folder / "small" / "config.json").write_text(json.dumps(described))
    (folder / "data.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"txt": "three"}\n')
    (folder / "config.yaml").write_text(
        "model: {model_name_or_path: small}\n"
        "data: {files: data.jsonl, tokenizer: bytes, sequence_length: 64}\n"
    )
    done = train(muster)
    assert done.code == 2
    assert done.err == snapshot
    assert not list_runs(folder / "runs")
