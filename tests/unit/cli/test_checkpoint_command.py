"""``muster checkpoint``: what it lists, what it finds damaged, what it exports, and how it is asked."""

import json
import re
from pathlib import Path

import pytest

from made_up_checkpoints import save, write
from muster_command import Muster
from torchmuster.checkpoints.local import FolderStore
from torchmuster.cli import checkpoint
from torchmuster.cli.checkpoint_places import meant_by
from torchmuster.errors import NoSuchRun
from torchmuster.runfolder import RunFolder, create


@pytest.fixture
def run(own_machine: Path) -> RunFolder:
    """A run with two good checkpoints, a damaged one and one that was not finished."""
    run = create(own_machine / "runs", "train")
    store = FolderStore(run.checkpoints)
    names = [save(store, step).name for step in (10, 20, 30)]
    (run.checkpoints / names[2] / "state.json").write_text("{}")
    write(store, 40)
    final = run.checkpoints / "final"
    final.mkdir()
    (final / "config.json").write_text("{}")
    return run


def test_a_run_s_checkpoints_are_listed_newest_first(muster: Muster, run: RunFolder) -> None:
    listed = muster("checkpoint", "ls", env={"TZ": "UTC"})
    assert listed.code == 0
    lines = [re.sub(r"-[0-9a-f]{4}\b", "-0000", line) for line in listed.out.splitlines()]
    assert lines[:6] == [
        "step  saved                ranks  strategy   size  state       name",
        "  40  -                        -  -             -  unfinished  step-00000040-0000",
        "  30  2026-01-31 12:00:30      2  fsdp      500 B  damaged     step-00000030-0000",
        "  20  2026-01-31 12:00:20      2  fsdp      500 B  complete    step-00000020-0000",
        "  10  2026-01-31 12:00:10      2  fsdp      500 B  complete    step-00000010-0000",
        "failure  step-00000030-0000 is damaged: state.json is cut off",
    ]
    as_json = json.loads(muster("checkpoint", "ls", str(run.path), "--json").out)
    assert [one["state"] for one in as_json] == ["unfinished", "damaged", "complete", "complete"]
    assert as_json[3]["world_size"] == 2
    assert as_json[3]["global_batch_size"] == 32
    assert as_json[3]["size_bytes"] == 500
    assert as_json[0]["size_bytes"] is None
    assert as_json[1]["findings"][0]["name"] == "checkpoint-file-truncated"


def test_damage_is_an_exit_code(muster: Muster, run: RunFolder) -> None:
    everything = muster("checkpoint", "verify")
    assert everything.code == 1
    assert "is damaged: state.json is cut off" in everything.out
    assert everything.out.count("good: 6 files, 500 B, all as written") == 2
    one = muster("checkpoint", "verify", "last", "20", "--json")
    assert one.code == 0
    assert [(row["step"], row["state"]) for row in json.loads(one.out)] == [(20, "good")]
    assert muster("checkpoint", "verify", "last", "40").code == 1  # asked for, and not finished


def test_the_newest_good_one_is_exported(muster: Muster, run: RunFolder, own_machine: Path) -> None:
    done = muster("checkpoint", "export", "--to", "my-model")
    assert done.code == 0
    assert "is damaged: state.json is cut off" in done.err  # what is passed over is said
    assert re.sub(r"-[0-9a-f]{4}\b", "-0000", done.out).splitlines() == [
        "my-model: model.safetensors, 1 tensor, 32 B, from step-00000020-0000",
        "beside them: config.json",
    ]
    assert sorted(one.name for one in (own_machine / "my-model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    damaged = muster("checkpoint", "export", "last", "30", "--to", "other")
    assert damaged.code == 1
    assert "nothing was exported: step-00000030-" in damaged.err
    assert "is not good" in damaged.err
    assert muster("checkpoint", "export", "--to", "my-model").code == 2
    assert not (own_machine / "other").exists()


def test_what_can_be_meant(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = run.path.parent
    names = FolderStore(run.checkpoints).names()
    for place in ("last", run.id, str(run.path), str(run.checkpoints)):
        meant = meant_by(place, "", runs=runs)
        assert meant.store.where == str(run.checkpoints), place
        assert meant.names() == names[::-1]
        assert meant.folder_beside() == run.checkpoints / "final"
    assert meant_by(names[1], "", runs=runs).names() == [names[1]]
    assert meant_by("last", "10", runs=runs).names() == [names[0]]
    assert meant_by(f"{run.checkpoints}/{names[1]}/", "", runs=runs).names() == [names[1]]
    assert meant_by("memory://b/x", "", runs=runs).store.where == "memory:///b/x"
    assert meant_by(f"memory://b/x/{names[1]}", "", runs=runs).wanted == names[1]
    with pytest.raises(NoSuchRun):
        meant_by("nowhere", "", runs=runs)


def test_a_run_says_where_else_its_checkpoints_are(run: RunFolder, own_machine: Path) -> None:
    run.config.write_text(f"checkpoint:\n  folder: {own_machine}/elsewhere\n")
    meant = meant_by(run.id, "", runs=run.path.parent)
    assert meant.store.where == f"{own_machine}/elsewhere/{run.id}"
    run.config.write_text("of another version: {}\n")
    assert meant_by(run.id, "", runs=run.path.parent).store.where == str(run.checkpoints)


def test_nothing_is_silent_for_long(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "_SAID_EVERY_S", 0.0)
    progress = checkpoint._Progress("step-1: read", None)
    progress(2**20)
    progress(2**20)
    assert capsys.readouterr().err.splitlines() == [
        "step-1: read 1.0 MiB",
        "step-1: read 2.0 MiB",
    ]
