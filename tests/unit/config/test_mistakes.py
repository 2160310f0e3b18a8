"""Every mistake in a settings file, at its line and column, in the words people see."""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import ConfigError


def mistakes(folder: Path, text: str) -> list[str]:
    """Return what is wrong with a file, its name left out."""
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve_settings(file=path)
    lines = shown(caught.value)
    assert all(line.startswith(str(path)) for line in lines)
    return [line.removeprefix(str(path)) for line in lines]


def shown(error: ConfigError) -> list[str]:
    """Return the lines that people see, below the headline."""
    headline, *lines = str(error).splitlines()
    assert str(len(lines)) in headline or len(lines) == 1
    return lines


def places(lines: list[str]) -> list[str]:
    return [line.partition(": ")[0] for line in lines]


def test_many_mistakes_are_reported_at_once_in_the_order_of_the_file(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
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
    found = mistakes(tmp_path, text)
    assert places(found) == [
        *(":2:18", ":4:12", ":5:3", ":6:13", ":8:5", ":11:16", ":14:1", ":17:16", ":19:3")
    ]
    assert found == snapshot


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("distributed: {num_gpus: 1e3}", ":1:25: distributed.num_gpus: "),
        ("distributed: {num_gpus: '2'}", ":1:25: distributed.num_gpus: "),
        ("distributed: {gpu_ids: '0,2'}", ":1:24: distributed.gpu_ids: "),
        ("distributed: {gpu_ids: []}", ":1:24: distributed.gpu_ids: "),
        ("distributed: {gpu_ids: [0, [1]]}", ":1:24: distributed.gpu_ids: "),
        ("experiment_name:\nmodel: {}", ":1:1: experiment_name: "),
        ("experiment_name: ~", ":1:18: experiment_name: "),
        ("model: {device_map: CUDA}", ":1:21: model.device_map: "),
        ("data: {files: [a.txt, 3]}", ":1:15: data.files: "),
        ("distributed: 3", ":1:14: distributed is a group"),
        ("model: ''", ":1:8: model is a group"),
        ("- a\n- b", ":1:1: a settings file consists of"),
        ("just text", ":1:1: a settings file consists of"),
        ("{[a, b]: 1}", ":1:2: a key must be a plain string"),
        ("'': 1", ":1:1: '' is not a setting"),
        ('"a\\nb": 1', ":1:1: 'a\\nb' is not a setting"),
        ("distributed.num_gpus: 2", ":1:1: distributed.num_gpus is not a setting"),
        ("model:\n  x: 1\nmodel:\n  y: 1", ":3:1: model is given twice"),
    ],
)
def test_one_mistake(text: str, mistake: str, tmp_path: Path) -> None:
    assert mistakes(tmp_path, text)[-1].startswith(mistake)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        # its own section first, then the others
        ("distributed: {strateggy: ddp}", "distributed.strategy"),
        ("distributed: {torch_dtype: x}", "model.torch_dtype"),
        ("num_gpus: 2", "distributed.num_gpus"),
        ("experiment-name: x", "experiment_name"),
        ("Distributed: {}", "distributed"),
        ("distributed: {strategy: DDP}", "ddp"),
        ("distributed: {zzzzz: 1}", ""),
        ("zoo: {lr: 1}", ""),
    ],
)
def test_what_was_meant(text: str, meant: str, tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, text)
    assert found.endswith(f" {meant}?") if meant else "?" not in found


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
        resolve_settings(file=path, environment=environment, flags=flags)
    assert [one.where for one in caught.value.mistakes] == [
        f"{path}:1:1",
        "$TORCHMUSTER_DISTRIBUTED_NUM_GPUS",
        "$TORCHMUSTER_MODEL_DTYPE",
        "$TORCHMUSTER_DISTRIBUTED_GPU_IDS",
        "--set model",
        "--set modle.torch_dtype",
        "--num-gpus",
    ]


def test_a_secret_in_the_wrong_place_is_not_repeated(tmp_path: Path) -> None:
    token = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"
    (mistake,) = mistakes(tmp_path, f"model: {{torch_dtype: {token}}}")
    assert token not in mistake
    assert "[redacted]" in mistake
