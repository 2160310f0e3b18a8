"""Every mistake in a settings file, at its line and column, in the words people see."""

from pathlib import Path

import pytest

from torchmuster.config import fields
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve
from torchmuster.errors import ConfigError

GPU_ID = "a whole number of at least 0 or a text"


def mistakes(folder: Path, text: str) -> list[str]:
    """Return what is wrong with a file, its name left out."""
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve(file=path)
    head, *lines = str(caught.value).splitlines()
    assert head.startswith("the settings have ")
    assert all(line.startswith(str(path)) for line in lines)
    return [line.removeprefix(str(path)) for line in lines]


def test_many_mistakes_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
# a first try
experiment_name: 2026
distributed:
  enabled: yes
  num_gpu: 2
  strategy: ddb
  gpu_ids:
    - 0
    - -1
    - 1.5
  master_port: 99999


modell:
  torch_dtype: bfloat16
model:
  torch_dtype: [bfloat16]
  device_map: auto
  device_map: cuda
"""
    assert mistakes(tmp_path, text) == [
        ":2:18: experiment_name must be a text; this is the number 2026; write it in quotes",
        ":4:12: distributed.enabled must be true or false; this is the text 'yes'; "
        "YAML 1.2 knows only true and false",
        ":5:3: distributed.num_gpu is not a setting; did you mean distributed.num_gpus?",
        ":6:13: distributed.strategy must be one of auto, ddp, fsdp; this is the text 'ddb'; "
        "did you mean ddp?",
        f":9:7: item 2 of distributed.gpu_ids must be {GPU_ID}; this is the number -1",
        f":10:7: item 3 of distributed.gpu_ids must be {GPU_ID}; this is the number 1.5",
        ":11:16: distributed.master_port must be a whole number from 1 to 65535; "
        "this is the number 99999",
        ":14:1: modell is not a setting; did you mean model?",
        ":17:16: model.torch_dtype must be one of auto, bfloat16, float16, float32; this is a list",
        ":19:3: model.device_map is written twice; the first is on line 18",
    ]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (
            "distributed: {num_gpus: 1e-5}",
            ":1:25: distributed.num_gpus must be a whole number of at least 1; "
            "this is the number 1e-05",
        ),
        (
            "distributed: {num_gpus: 1e3}",
            ":1:25: distributed.num_gpus must be a whole number of at least 1; "
            "this is the number 1000.0; write it as 1000",
        ),
        (
            "distributed: {num_gpus: '2'}",
            ":1:25: distributed.num_gpus must be a whole number of at least 1; this is the text '2'",
        ),
        (
            "distributed: {num_gpus: true}",
            ":1:25: distributed.num_gpus must be a whole number of at least 1; this is true",
        ),
        (
            "distributed: {enabled: 1}",
            ":1:24: distributed.enabled must be true or false; this is the number 1",
        ),
        (
            "distributed: {enabled: Off}",
            ":1:24: distributed.enabled must be true or false; this is the text 'Off'; "
            "YAML 1.2 knows only true and false",
        ),
        (
            "distributed: {gpu_ids: 0}",
            f":1:24: distributed.gpu_ids must be a list, each item {GPU_ID}; this is the number 0; "
            "write it as [0]",
        ),
        (
            "distributed: {gpu_ids: '0,2'}",
            f":1:24: distributed.gpu_ids must be a list, each item {GPU_ID}; "
            "this is the text '0,2'; write it as [0,2]",
        ),
        (
            "distributed: {gpu_ids: []}",
            f":1:24: distributed.gpu_ids must be a list, each item {GPU_ID}; "
            "this is an empty list; leave it out, or give it a value",
        ),
        (
            "distributed: {gpu_ids: [0, [1]]}",
            f":1:28: item 2 of distributed.gpu_ids must be {GPU_ID}; this is a list",
        ),
        (
            "distributed: {gpu_ids: [{a: 1}]}",
            f":1:25: item 1 of distributed.gpu_ids must be {GPU_ID}; this is a group of settings",
        ),
        (
            "experiment_name: true",
            ":1:18: experiment_name must be a text; this is true; write it in quotes",
        ),
        (
            "experiment_name: {a: b}",
            ":1:18: experiment_name must be a text; this is a group of settings",
        ),
        (
            "experiment_name: ''",
            ":1:18: experiment_name must be a text; this is empty; leave it out, or give it a value",
        ),
        (
            "experiment_name:\nmodel: {}",
            ":1:1: experiment_name must be a text; this is empty; leave it out, or give it a value",
        ),
        (
            "experiment_name: ~",
            ":1:18: experiment_name must be a text; this is empty; leave it out, or give it a value",
        ),
        (
            "model: {device_map: CUDA}",
            ":1:21: model.device_map must be one of auto, cpu, cuda; this is the text 'CUDA'; "
            "did you mean cuda?",
        ),
        (
            "model: {torch_dtype: fp8_e4m3}",
            ":1:22: model.torch_dtype must be one of auto, bfloat16, float16, float32; "
            "this is the text 'fp8_e4m3'",
        ),
        ("distributed: 3", ":1:14: distributed holds settings, each on a line of its own below it"),
        ("model: [a]", ":1:8: model holds settings, each on a line of its own below it"),
        ("model: ''", ":1:8: model holds settings, each on a line of its own below it"),
        ("- a\n- b", ":1:1: a settings file is made of `key: value` lines"),
        ("just text", ":1:1: a settings file is made of `key: value` lines"),
        ("{[a, b]: 1}", ":1:2: a key is a single word"),
        ("'': 1", ":1:1: '' is not a setting"),
        ('"a\\nb": 1', ":1:1: 'a\\nb' is not a setting"),
        (
            "distributed.num_gpus: 2",
            ":1:1: distributed.num_gpus is one key with a dot in it; "
            "write num_gpus on a line of its own below distributed:",
        ),
        ("model:\n  x: 1\nmodel:\n  y: 1", ":3:1: model is written twice; the first is on line 1"),
    ],
)
def test_one_mistake(text: str, mistake: str, tmp_path: Path) -> None:
    assert mistakes(tmp_path, text)[-1] == mistake


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        # its own section first, then the others
        (
            "distributed: {strateggy: ddp}",
            "distributed.strateggy is not a setting; did you mean distributed.strategy?",
        ),
        (
            "distributed: {torch_dtype: x}",
            "distributed.torch_dtype is not a setting; did you mean model.torch_dtype?",
        ),
        ("num_gpus: 2", "num_gpus is not a setting; did you mean distributed.num_gpus?"),
        ("experiment-name: x", "experiment-name is not a setting; did you mean experiment_name?"),
        ("Distributed: {}", "Distributed is not a setting; did you mean distributed?"),
        ("distributed: {zzzzz: 1}", "distributed.zzzzz is not a setting"),
        ("optimizer: {lr: 1}", "optimizer is not a setting; did you mean train.optimizer?"),
        ("wandb: {lr: 1}", "wandb is not a setting; did you mean metrics.wandb_mode?"),
        ("zoo: {lr: 1}", "zoo is not a setting"),
    ],
)
def test_unknown_keys_and_what_was_meant(text: str, mistake: str, tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, text)
    assert found.split(": ", 1)[1] == mistake


def test_of_equal_names_the_one_in_the_same_section_is_suggested() -> None:
    known = ["first.enabled", "second.enabled"]
    assert fields.suggest("first.enabld", known) == "did you mean first.enabled?"
    assert fields.suggest("second.enabld", known) == "did you mean second.enabled?"


def test_an_alias_is_reported_where_it_stands(tmp_path: Path) -> None:
    text = "experiment_name: &name llama\ndistributed:\n  num_gpus: *name\n"
    assert mistakes(tmp_path, text) == [
        ":3:3: distributed.num_gpus must be a whole number of at least 1; this is the text 'llama'"
    ]


def test_a_wrong_value_is_reported_even_where_a_stronger_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed: {num_gpus: 0}")
    with pytest.raises(ConfigError) as caught:
        resolve(file=path, flags=[Flag(flag="--num-gpus", path="distributed.num_gpus", text="2")])
    assert [one.where for one in caught.value.mistakes] == [f"{path}:1:25"]


def test_all_places_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("modle: {}\n")
    environment = {
        "TORCHMUSTER_DISTRIBUTED_GPU_IDS": "0,-1",
        "TORCHMUSTER_DISTRIBUTED_NUM_GPUS": "[2",
        "TORCHMUSTER_MODEL_DTYPE": "x",
    }
    flags = [
        Flag(flag="--num-gpus", path="distributed.num_gpus", text=""),
        Flag(flag="--set model", path="model", text="Qwen/Qwen2.5-7B"),
        Flag(flag="--set modle.torch_dtype", path="modle.torch_dtype", text="auto"),
    ]
    with pytest.raises(ConfigError) as caught:
        resolve(file=path, environment=environment, flags=flags)
    assert str(caught.value).splitlines() == [
        "the settings have 7 mistakes",
        f"{path}:1:1: modle is not a setting; did you mean model?",
        f"$TORCHMUSTER_DISTRIBUTED_GPU_IDS: item 2 of distributed.gpu_ids must be {GPU_ID}; "
        "this is the number -1",
        "$TORCHMUSTER_DISTRIBUTED_NUM_GPUS: is not YAML: "
        "expected ',' or ']', but got '<stream end>'",
        "$TORCHMUSTER_MODEL_DTYPE: is not a setting; did you mean TORCHMUSTER_MODEL_TORCH_DTYPE?",
        "--num-gpus: distributed.num_gpus must be a whole number of at least 1; this is empty; "
        "leave it out, or give it a value",
        "--set model: model is a group of settings; "
        "name one of them, such as model.model_name_or_path",
        "--set modle.torch_dtype: modle.torch_dtype is not a setting; "
        "did you mean model.torch_dtype?",
    ]


def test_a_secret_in_the_wrong_place_is_not_repeated(tmp_path: Path) -> None:
    token = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"
    (mistake,) = mistakes(tmp_path, f"model: {{torch_dtype: {token}}}")
    assert mistake.endswith("this is the text '[redacted]'")


def test_a_long_value_is_cut_short(tmp_path: Path) -> None:
    (mistake,) = mistakes(tmp_path, f"model: {{torch_dtype: {'x' * 5000}}}")
    assert mistake.endswith(f"this is the text '{'x' * 59}…'")
