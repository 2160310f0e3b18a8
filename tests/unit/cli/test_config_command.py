"""``muster config`` as people and scripts run it: a real process each time."""

import json
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from torchmuster.cli.config import recipes
from torchmuster.config import fields
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.training import check_trainable
from torchmuster.errors import ExitCode

pytestmark = pytest.mark.slow

TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"


@pytest.fixture
def config(own_machine: Path) -> Path:
    path = own_machine / "config.yaml"
    path.write_text(
        "experiment_name: llama\ndistributed:\n  num_gpus: 4\n  gpu_ids: [0, 0:1, 2, 3]\n"
    )
    return path


@pytest.fixture
def broken(own_machine: Path) -> Path:
    path = own_machine / "broken.yaml"
    path.write_text("distributed:\n  num_gpu: 2\n  gpu_ids: [0, -1]\n  enabled: yes\n")
    return path


def test_show_prints_every_setting_its_value_and_its_source(muster: Muster, config: Path) -> None:
    done = muster(
        "config", "show", "--config", "config.yaml", "--set", "distributed.strategy=fsdp",
        env={"TORCHMUSTER_MODEL_TORCH_DTYPE": "bfloat16", "TORCHMUSTER_EXPERIMENT_NAME": "mine"},
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()] == list(fields.leaves())
    shown = """\
experiment_name                     mine            $TORCHMUSTER_EXPERIMENT_NAME
distributed.enabled                 true            default ($TORCHMUSTER_DISTRIBUTED_ENABLED)
distributed.num_gpus                4               config.yaml:3:13
distributed.gpu_ids                 [0, 0:1, 2, 3]  config.yaml:4:12
distributed.strategy                fsdp            --set distributed.strategy
distributed.fsdp_sharding_strategy  full_shard      default ($TORCHMUSTER_DISTRIBUTED_FSDP_SHARDING_STRATEGY)
model.torch_dtype                   bfloat16        $TORCHMUSTER_MODEL_TORCH_DTYPE
data.files                          -               default ($TORCHMUSTER_DATA_FILES)
train.learning_rate                 0.001           default ($TORCHMUSTER_TRAIN_LEARNING_RATE)
"""
    assert set(shown.splitlines()) <= set(done.out.splitlines())


def test_show_as_json_has_plain_values_and_sources(muster: Muster, config: Path) -> None:
    done = muster("config", "show", "--config", "config.yaml", "--json")
    assert (done.code, done.err) == (0, "")
    shown = json.loads(done.out)
    assert list(shown) == list(fields.leaves())
    assert shown["distributed.gpu_ids"] == {"value": [0, "0:1", 2, 3], "source": "config.yaml:4:12"}
    assert shown["distributed.enabled"] == {"value": True, "source": "default"}
    assert shown["model.model_name_or_path"] == {"value": None, "source": "default"}


def test_no_file_is_read_that_was_not_named(muster: Muster, config: Path) -> None:
    shown = json.loads(muster("config", "show", "--json").out)
    assert {one["source"] for one in shown.values()} == {"default"}


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_what_looks_like_a_secret_is_not_shown(how: list[str], muster: Muster) -> None:
    words = ["--set", f"experiment_name={TOKEN}", "--set", f"model.model_name_or_path=x {TOKEN}"]
    done = muster("config", "show", *how, *words)
    assert done.code == 0
    assert "[redacted]" in done.out
    assert TOKEN not in done.out


def test_check_of_a_good_file(muster: Muster, config: Path) -> None:
    done = muster("config", "check", "config.yaml")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"config.yaml: valid, 3 of {len(fields.leaves())} settings given\n"


def test_check_of_a_bad_file_reports_every_mistake(
    muster: Muster, broken: Path, snapshot: SnapshotAssertion
) -> None:
    done = muster("config", "check", "broken.yaml")
    assert (done.code, done.out) == (2, "")
    assert done.err == snapshot
    assert muster("config", "show", "--config", "broken.yaml") == done


def test_check_names_what_no_training_accepts(muster: Muster, config: Path) -> None:
    config.write_text("checkpoint:\n  every: 3 steps\n")
    done = muster("config", "check", "config.yaml")
    assert done.code == 2
    assert done.err.startswith("failure  config.yaml:2:")
    assert "checkpoint.every" in done.err


def test_errors_as_json_are_findings_on_stdout(muster: Muster, broken: Path) -> None:
    done = muster("config", "show", "--config", "broken.yaml", "--json")
    assert (done.code, done.err) == (2, "")
    found = json.loads(done.out)["findings"]
    assert [one["what"].split(": ")[0] for one in found] == [
        "broken.yaml:2:3",
        "broken.yaml:3:12",
        "broken.yaml:4:12",
    ]
    assert {(one["name"], one["status"]) for one in found} == {("config-error", "failure")}
    assert found[0].keys() == {"name", "status", "what", "why", "fix", "evidence"}
    assert "distributed.num_gpus" in found[0]["fix"]


def test_an_unknown_command_is_refused_with_the_nearest_one(muster: Muster) -> None:
    done = muster("frobnicate")
    assert (done.code, done.out) == (2, "")
    complaint = done.err.splitlines()[-1]
    assert "there is no command 'frobnicate'" in complaint
    assert "did you mean train?" in muster("trian").err


@pytest.mark.parametrize("words", [(), ("lab",), ("config",), ("checkpoint",), ("bench",)])
def test_a_command_without_its_action_shows_its_help(
    words: tuple[str, ...], muster: Muster
) -> None:
    done = muster(*words)
    assert done.code == ExitCode.IMPOSSIBLE
    assert done.out.startswith(" ".join(("usage: muster", *words)))
    assert done.err == ""


RECIPES = ["images", "pretrain", "qlora", "sft", "sft-lora"]


@pytest.mark.parametrize("name", RECIPES)
def test_new_writes_a_recipe_that_can_be_trained_and_overwrites_nothing(
    name: str, muster: Muster, tmp_path: Path
) -> None:
    done = muster("config", "new", name)
    assert done.code == ExitCode.GOOD, done.err
    assert f"muster train --config {name}.yaml" in done.out
    path = tmp_path / f"{name}.yaml"
    resolved = resolve_settings(file=path)
    check_trainable(resolved, file=str(path))
    assert resolved.settings.experiment_name == name
    path.write_text("mine")
    assert muster("config", "new", name).code == ExitCode.IMPOSSIBLE
    assert path.read_text() == "mine"


def test_new_without_a_name_lists_the_recipes(muster: Muster) -> None:
    lines = muster("config", "new").out.splitlines()
    assert [line.split()[0] for line in lines] == RECIPES == list(recipes())


def test_new_refuses_an_unknown_recipe_with_the_known_ones(muster: Muster) -> None:
    refused = muster("config", "new", "grpo")
    assert refused.code == ExitCode.IMPOSSIBLE
    assert all(name in refused.err for name in RECIPES)
