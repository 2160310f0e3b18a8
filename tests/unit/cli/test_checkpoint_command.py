"""``muster checkpoint``: what it lists, what it finds damaged, what it exports, and how it is asked."""

import json
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_checkpoints import SHARD, save, write
from muster_command import Muster
from torchmuster.checkpoints.store import FolderStore
from torchmuster.cli.checkpoint import find_store
from torchmuster.runfolder import RunFolder, create_run_folder

pytestmark = pytest.mark.slow


@pytest.fixture
def run(own_machine: Path) -> RunFolder:
    """A run with two good checkpoints, a damaged one and one that was not finished."""
    run = create_run_folder(own_machine / "runs", "train")
    store = FolderStore(run.checkpoints)
    names = [save(store, step).name for step in (10, 20, 30)]
    (run.checkpoints / names[2] / SHARD.format(1)).write_text("{}")
    write(store, 40)
    run.model.mkdir()
    (run.model / "tokenizer.json").write_text("{}")
    return run


def test_a_run_s_checkpoints_are_listed_newest_first(
    muster: Muster, run: RunFolder, snapshot: SnapshotAssertion
) -> None:
    listed = muster("checkpoint", "list", env={"TZ": "UTC"})
    assert listed.code == 0
    assert listed.out == snapshot
    as_json = json.loads(muster("checkpoint", "list", str(run.path), "--json").out)
    assert [one["state"] for one in as_json] == ["unfinished", "damaged", "complete", "complete"]
    assert as_json[3]["world_size"] == 2
    assert as_json[3]["global_batch_size"] == 32
    assert as_json[3]["size_bytes"] == 384
    assert as_json[0]["size_bytes"] is None
    assert as_json[1]["findings"][0]["name"] == "checkpoint-file-truncated"


def test_the_best_one_is_shown_and_found_by_that_name(muster: Muster, run: RunFolder) -> None:
    none = muster("checkpoint", "verify", "last", "best")
    assert none.code == 2
    save(FolderStore(run.checkpoints), 50, best={"loss": 1.5})
    save(FolderStore(run.checkpoints), 60, best={"loss": 0.123456})
    save(FolderStore(run.checkpoints), 70)
    listed = muster("checkpoint", "list", env={"TZ": "UTC"}).out.splitlines()
    assert ["best" in line for line in listed[:5]] == [False, False, True, False, False]
    assert "loss 0.1235" in listed[2]
    as_json = json.loads(muster("checkpoint", "list", "--json").out)
    assert [one["best"] for one in as_json[:3]] == [None, {"loss": 0.123456}, None]
    good = muster("checkpoint", "verify", "last", "best", "--json")
    assert [row["step"] for row in json.loads(good.out)] == [60]


def test_damage_is_an_exit_code(muster: Muster, run: RunFolder) -> None:
    everything = muster("checkpoint", "verify")
    assert everything.code == 1
    one = muster("checkpoint", "verify", "last", "20", "--json")
    assert one.code == 0
    assert [(row["step"], row["state"]) for row in json.loads(one.out)] == [(20, "good")]
    assert muster("checkpoint", "verify", "last", "40").code == 1  # asked for, and not finished


def test_the_newest_good_one_is_exported(muster: Muster, run: RunFolder, own_machine: Path) -> None:
    done = muster("checkpoint", "export", "--to", "my-model")
    assert done.code == 0
    assert "step-00000030-" in done.err  # the damaged one is passed over, which is reported
    assert "step-00000020-" in done.out
    assert sorted(one.name for one in (own_machine / "my-model").iterdir()) == [
        "model.safetensors",
        "tokenizer.json",
    ]
    damaged = muster("checkpoint", "export", "last", "30", "--to", "other")
    assert damaged.code == 1
    assert "step-00000030-" in damaged.err
    assert muster("checkpoint", "export", "--to", "my-model").code == 2
    assert not (own_machine / "other").exists()


@pytest.mark.integrations
def test_weights_that_are_not_those_of_the_model_are_an_error(
    muster: Muster, run: RunFolder, own_machine: Path
) -> None:
    """transformers would fill a model with random weights, and say so only in passing."""
    described = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    described |= {"num_attention_heads": 2, "intermediate_size": 16}
    (run.model / "config.json").write_text(json.dumps(described))
    done = muster("checkpoint", "export", "--to", "my-model")
    assert done.code == 1
    assert "lm_head.weight, model.embed_tokens.weight" in done.err
    assert not (own_machine / "my-model").exists()
    assert not [one for one in own_machine.iterdir() if "unfinished" in one.name]


def test_what_cannot_be_checked_is_a_warning(
    muster: Muster, run: RunFolder, own_machine: Path
) -> None:
    (run.model / "config.json").write_text("{}")
    (own_machine / "shadow" / "transformers").mkdir(parents=True)
    (own_machine / "shadow" / "transformers" / "__init__.py").write_text(
        "raise ImportError('broken')"
    )
    done = muster(
        "checkpoint", "export", "--to", "out", env={"PYTHONPATH": f"{own_machine}/shadow"}
    )
    assert done.code == 0, done.err
    assert "broken" in done.err


def test_only_lora_can_be_merged(muster: Muster, run: RunFolder, own_machine: Path) -> None:
    done = muster("checkpoint", "export", "--merge", "--to", "my-model")
    assert done.code == 2
    assert not (own_machine / "my-model").exists()


def test_a_run_says_where_else_its_checkpoints_are(run: RunFolder, own_machine: Path) -> None:
    run.config.write_text(f"checkpoint:\n  folder: {own_machine}/elsewhere\n")
    assert find_store(run.id, run.path.parent)[0].where == f"{own_machine}/elsewhere/{run.id}"
    run.config.write_text("of another version: {}\n")
    assert find_store(run.id, run.path.parent)[0].where == str(run.checkpoints)
