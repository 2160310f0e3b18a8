"""A training that follows its plan: ``--plan``."""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from batch_size_cases import write_model
from muster_command import Muster
from torchmuster.plan.proof import comparison
from torchmuster.runfolder import list_runs

pytestmark = [pytest.mark.ranks, pytest.mark.nightly]


def test_a_training_follows_its_plan_and_is_held_against_it(
    muster: Muster, own_machine: Path
) -> None:
    write_model(own_machine)
    (own_machine / "config.yaml").write_text(
        "model: {build: 'own:model'}\ndata: {dataset: 'own:data'}\n"
        "train: {steps: 4, global_batch_size: 8}\ncheckpoint: {every: never}\n"
    )
    flags = ("--config", "config.yaml", "--plan", "--device", "cpu", "--ranks", "2")
    environment = {"XDG_CACHE_HOME": str(own_machine / "cache"), "COLUMNS": "300"}
    done = muster("train", *flags, env=environment)
    assert done.code == 0, done
    assert "plan: ddp over 2 " in done.err
    (run,) = list_runs(own_machine / "runs")
    promise = comparison.read_promise(run.path)
    assert promise is not None
    size = promise.candidate.micro_batch_size
    assert f"  micro_batch_size: {size}  # --plan\n" in run.config.read_text()
    assert f"batch     {size} per rank x 2 ranks" in done.out
    (line,) = [one for one in done.out.splitlines() if "plan after step 3: " in one]
    assert "memory is not measured on the CPU; muster plan --verify measures it" in line
    assert "step 3/4" in done.out


def test_a_plan_is_for_this_machine_and_for_a_new_run(
    muster: Muster, own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    write_model(own_machine)
    (own_machine / "config.yaml").write_text(
        "model: {build: 'own:model'}\ndata: {dataset: 'own:data'}\n"
    )
    done = muster("train", "--config", "config.yaml", "--plan", "--hosts", "a,b")
    assert done.code == 2
    assert "--plan " in done.err
    assert done.err == snapshot
    assert "muster plan --hardware … --write plan.yaml" in done.err
