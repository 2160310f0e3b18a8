"""The JSON Schema: valid, complete, and of one mind with the command about what is right."""

from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from torchmuster.config import yaml12
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.written import json_schema
from torchmuster.errors import ConfigError

ALL_KEYS = """
experiment_name: my_experiment
distributed:
  enabled: true
  num_gpus: 4
  gpu_ids: [0, 1, 2, 3]
  strategy: ddp
  fsdp_sharding_strategy: full_shard
  fsdp_cpu_offload: false
  find_unused_parameters: false
  master_port: 29500
launch:
  hosts: [a, "b:4"]
  max_restarts: 3
  spares: 1
  remote_python: /opt/venv/bin/python
  address: eth0
  join_port: 29398
  join_timeout: 5m
  lost_after: 20s
  grace: 60s
  end_hangs_after: never
model:
  model_name_or_path: Qwen/Qwen2.5-7B
  build: my_model:make
  device_map: auto
  torch_dtype: bfloat16
  loss: language_model
  lora: {r: 8, lora_alpha: 16, target_modules: [q_proj, v_proj]}
  load_in_4bit: true
data:
  dataset: my_data:train
  files: data/*.jsonl
  hugging_face: wikitext
  options: {name: wikitext-2-raw-v1}
  columns: {messages: conversation, prompt: question, completion: answer}
  tokenizer: bytes
  sequence_length: 2048
  pack: true
  shuffle: false
  workers: 2
  evaluation: [a.jsonl, b.jsonl]
  images: pictures
train:
  epochs: 3
  steps: 1000
  global_batch_size: 64
  micro_batch_size: 8
  optimizer: adamw
  learning_rate: 3e-4
  weight_decay: 0
  optimizer_options: {betas: [0.9, 0.95], eps: 1e-7}
  schedule: cosine
  warmup: 3%
  clip_norm: 1.0
  precision: bf16
  seed: 1
  activation_checkpointing: 2
  compile: true
  log_every: 1
  evaluate_every: 100
checkpoint:
  every: 10min
  keep: 2
  keep_best: true
  folder: s3://bucket/place
metrics:
  sinks: [tensorboard, mlflow, wandb]
"""

GOOD = [
    "{}",
    ALL_KEYS,
    # the ways to choose GPUs: quick, one, several, a large model
    'distributed:\n  num_gpus: 2          # Use 2 GPUs\n  gpu_ids: [0, 2]\n  strategy: "ddp"\n',
    "distributed:\n  enabled: false\n  num_gpus: 1\n  gpu_ids: [0]\n",
    "distributed: {enabled: true, num_gpus: 4, gpu_ids: [0, 1, 2, 3], strategy: ddp}",
    "distributed: {num_gpus: 8, strategy: fsdp, fsdp_sharding_strategy: full_shard}\n"
    "model: {model_name_or_path: meta-llama/Llama-2-70b-hf, torch_dtype: bfloat16}",
    # edges
    "distributed:\nmodel:\n",
    "distributed: {}\nmodel: ~",
    "distributed: {num_gpus: null, gpu_ids: null, master_port: null}",
    "distributed: {gpu_ids: [0:1, GPU-0515791b, '7']}",
    "distributed: {master_port: 65535, num_gpus: 1}",
    "experiment_name: 2026-01-01",
    "train: {activation_checkpointing: full, learning_rate: 1}",
    "train: {optimizer: 'my_code:make', schedule: warmup_stable_decay, warmup: 7}",
]

BAD = [
    "train: {warmup: 1.5}",
    "[]",
    "text",
    "modle: {}",
    "distributed.num_gpus: 2",
    "distributed: 3",
    "distributed: {num_gpu: 2}",
    "distributed: {num_gpus: 0}",
    "distributed: {num_gpus: 1.5}",
    "distributed: {gpu_ids: []}",
    "distributed: {gpu_ids: [null]}",
    "distributed: {enabled: yes}",
    "distributed: {strategy: null}",
    "distributed: {master_port: 65536}",
    "model: {model_name_or_path: ''}",
    "data: {files: [a, 3]}",
    "train: {learning_rate: 0}",
    "metrics: {sinks: [tensorbord]}",
    "train: {activation_checkpointing: 0}",
]


def schema_accepts(text: str) -> bool:
    node = yaml12.compose(text)
    assert node is not None
    checker = jsonschema.Draft202012Validator(json_schema())
    return bool(checker.is_valid(yaml12.value_of(node)))


def command_accepts(folder: Path, text: str) -> bool:
    path = folder / "c.yaml"
    path.write_text(text)
    try:
        resolve_settings(file=path)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("text", GOOD)
def test_what_is_right_is_accepted_by_schema_and_command(text: str, tmp_path: Path) -> None:
    assert schema_accepts(text)
    assert command_accepts(tmp_path, text)


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_is_refused_by_schema_and_command(text: str, tmp_path: Path) -> None:
    assert not schema_accepts(text)
    assert not command_accepts(tmp_path, text)


def test_the_example_with_all_keys_has_all_keys(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(ALL_KEYS)
    sources = resolve_settings(file=path).sources
    assert [name for name, source in sources.items() if source.where == "default"] == []
